"""Random workloads on a small pool over a faulty store: every answer is the one without a store."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from harness import disk_url, open_llm
from late_store import LateStore
from torch import Tensor

from kvconnect import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams
from kvconnect.backend import Backend, StoredBlock
from kvconnect.keys import BlockKey


class Moody(LateStore):
    """Each call works, fails, is slow, forgets, or corrupts, by a seeded dice."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.dice = random.Random(seed)

    async def _mood(self) -> float:
        mood = self.dice.random()
        if mood < 0.1:
            raise OSError("moody")
        if mood < 0.3:
            await asyncio.sleep(self.dice.random() * 0.02)
        return mood

    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        mood = await self._mood()
        return len(keys) if mood > 0.95 else await super().lookup(keys)

    async def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        mood = await self._mood()
        filled = await super().load(keys, into)
        if mood > 0.85 and filled:
            into[self.dice.randrange(filled)][self.dice.randrange(2048) :] ^= 0x40
        return filled

    async def save(self, blocks: Sequence[StoredBlock]) -> int:
        mood = await self._mood()
        if mood > 0.9:
            return await super().save(blocks[: len(blocks) // 2])
        return await super().save(blocks)


def _prompts(dice: random.Random) -> list[list[int]]:
    stems = [[dice.randrange(1, 250) for _ in range(dice.randrange(5, 90))] for _ in range(4)]
    prompts = []
    for _ in range(24):
        stem = dice.choice(stems)
        cut = dice.randrange(1, len(stem) + 1)
        own = [dice.randrange(1, 250) for _ in range(dice.randrange(1, 40))]
        prompts.append(stem[:cut] + own)
    return prompts + dice.sample(prompts, 8)


def _run(model: Path, store: Backend | str, seed: int, *, overlaps: bool = False) -> None:
    dice = random.Random(seed)
    prompts = _prompts(dice)
    params = [SamplingParams(max_tokens=dice.randrange(1, 30), ignore_eos=True) for _ in prompts]
    with open_llm(model, max_tokens=8192) as llm:
        wanted = [o.output_token_ids for o in llm.generate(prompts, params)]
    aborted = {i for i in range(len(prompts)) if dice.random() < 0.2}
    for round_number in range(2):
        with _small_engine(model, store, dice, overlaps=overlaps) as llm:
            handles = [llm.submit(p, s) for p, s in zip(prompts, params, strict=True)]
            for i in aborted if round_number == 0 else ():
                handles[i].abort()
            for i, handle in enumerate(handles):
                output = handle.result(120)
                if output.finish_reason == "abort":
                    assert i in aborted
                    tokens = output.output_token_ids
                    assert tokens == wanted[i][: len(tokens)]
                else:
                    assert output.output_token_ids == wanted[i], (seed, round_number, i)
            stats = llm.stats()
            assert stats.running_requests == stats.loading_requests == stats.waiting_requests == 0


def _small_engine(model: Path, store: Backend | str, dice: random.Random, *, overlaps: bool) -> LLM:
    source = {"url": store} if isinstance(store, str) else {"backend": store}
    config = KvCacheConnectorConfig(
        **source,
        lookup_timeout_ms=dice.choice([0, 2, 50]),
        load_timeout_s=dice.choice([0.05, 5]),
        save_timeout_s=60,
        overlap_loads=overlaps,
        on_backlog=dice.choice(["drop", "wait"]),
        save_on=dice.choice(["full", "finish"]),
        staging_bytes=dice.choice([1 << 20, 1 << 17]),
    )
    return LLM(
        model,
        kv_cache=KvCacheConfig(
            tokens_per_block=8,
            max_tokens=dice.choice([200, 400, 1500]),
            copy_on_partial_reuse=dice.choice([True, False]),
            enable_partial_reuse=dice.choice([True, True, False]),
        ),
        connector=config,
        dtype="float64",
        max_num_tokens=dice.choice([16, 64, 2048]),
        max_batch_size=dice.choice([2, 8, 64]),
    )


@pytest.mark.parametrize(("seed", "overlaps"), [(0, False), (1, True)])
def test_on_a_moody_store(model: Path, seed: int, overlaps: bool) -> None:
    _run(model, Moody(seed), seed, overlaps=overlaps)


def test_on_a_small_disk_store(model: Path, tmp_path: Path) -> None:
    _run(model, disk_url(tmp_path / "store", "256KiB"), 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_many_of_them(model: Path, tmp_path: Path, seed: int) -> None:
    _run(model, Moody(seed), seed, overlaps=bool(seed % 2))
    _run(model, disk_url(tmp_path / "store", "256KiB"), seed, overlaps=bool(seed % 2))
