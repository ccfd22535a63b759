"""What a decode computes beside a prefill that computes, stops or goes on, at random.

Every block of every step is compared with that of an engine that computes alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from engines import (
    ANSWER,
    PREFILL,
    Gate,
    T,
    address_of,
    hands_out,
    leaks_nothing,
    open_engine,
    prompt_of,
)

from kvconnect import LLM
from kvconnect.engine.engine import Engine
from kvconnect.overlap import Chunk, LoadingPrompt

BUDGET = 40
OVERLAPS = {"overlap_fetches": True}
Blocks = dict[tuple[int, ...], torch.Tensor]


class Checked:
    """The blocks of an engine's requests, after each step."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sound: Blocks = {}
        self.seen = 0
        self.wrong: list[tuple[int, int]] = []
        self.engines: dict[int, bool] = {}
        settle = Engine._settle

        def settle_and_look(engine: Engine, outcome: object) -> None:
            settle(engine, outcome)
            if (records := self.engines.get(id(engine))) is not None:
                self._look(engine, records=records)

        patch.setattr(Engine, "_settle", settle_and_look)

    def add(self, llm: LLM, *, records: bool) -> None:
        self.engines[id(llm._engine)] = records

    def _look(self, engine: Engine, *, records: bool) -> None:
        pool = engine._kv.pool_tensor(0)
        for live in list(engine._live):
            request = live.request
            if not request.num_computed_tokens:
                continue
            ids = engine._kv.get_batch_cache_indices([request])[request.request_id]
            tokens = request.tokens.view.tolist()
            for number in range(request.num_computed_tokens // T):
                key = tuple(tokens[: (number + 1) * T])
                block = pool[int(ids[number])]
                if records:
                    self.sound[key] = block.clone()
                elif key in self.sound:
                    self.seen += 1
                    if not torch.allclose(block, self.sound[key], rtol=0, atol=1e-9):
                        self.wrong.append((request.request_id, number))


class Dice:
    """Decides what is computed, in any number of tokens."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.dice = random.Random(0)
        self.eager = 0.5
        for name in ("next_chunk", "next_chunk_behind"):
            patch.setattr(f"kvconnect.engine.beside_loads.{name}", self._chunk)

    def _chunk(self, prompt: LoadingPrompt, *_: object, max_tokens: int, **__: object) -> Chunk:
        left = min(prompt.loaded_from - prompt.position, max_tokens)
        if left <= 0 or self.dice.random() >= self.eager:
            return Chunk(0, 0.001)
        rest = prompt.prompt_end - prompt.position
        if (
            prompt.loaded_from == prompt.match_end
            and rest <= max_tokens
            and self.dice.random() < 0.5
        ):
            return Chunk(rest)
        return Chunk(self.dice.randint(1, left))


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def checked(patch: pytest.MonkeyPatch) -> Checked:
    return Checked(patch)


@pytest.fixture(scope="module")
def dice(patch: pytest.MonkeyPatch) -> Dice:
    return Dice(patch)


@pytest.fixture(scope="module")
def engines(model_of, checked: Checked) -> Iterator[tuple[LLM, LLM, LLM]]:
    llama = model_of("llama")
    three = (
        open_engine(llama, None),
        open_engine(llama, "prefill", max_num_tokens=BUDGET),
        open_engine(llama, "decode", max_num_tokens=BUDGET, transfer=OVERLAPS),
    )
    checked.add(three[0], records=True)
    checked.add(three[2], records=False)
    yield three
    for llm in three:
        llm.close()


SEEDS = [
    *range(6),
    *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 200)),
]


@pytest.mark.parametrize("seed", SEEDS)
def test_no_block_is_wrong(seed, engines, checked, dice, monkeypatch):
    alone, prefill, decode = engines
    toss = dice.dice = random.Random(seed)
    dice.eager = toss.choice([0.1, 0.4, 0.9])
    prompt = prompt_of(toss.randint(2, 14 * T), seed=1000 + seed)
    (sound,) = alone.generate([prompt], ANSWER)
    here, there = hands_out(address_of(prefill), f"prompt {seed}")
    how = toss.choice(["finished", "beside", "beside", "stopped", "aborted", "reader aborted"])
    gate = Gate(toss.randint(1, 12)) if how not in ("finished", "beside") else None
    try:
        computing = prefill.submit(prompt, PREFILL, kv_transfer_params=here)
        if how == "finished":
            computing.result(60)
        reading = decode.submit(prompt, ANSWER, kv_transfer_params=there)
        if how == "aborted":
            gate.reached.wait(1)
            computing.abort()
        if how == "reader aborted":
            reading.abort()
        elif how == "stopped" and toss.random() < 0.5:
            assert list(reading.result(60).output_token_ids) == list(sound.output_token_ids)
    finally:
        if gate is not None:
            gate.open()
    output = reading.result(60)
    if how != "reader aborted":
        assert list(output.output_token_ids) == list(sound.output_token_ids)
    assert not checked.wrong
    computing.result(60)
    leaks_nothing(prefill, decode)
