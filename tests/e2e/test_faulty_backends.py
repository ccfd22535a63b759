"""A store that is slow, full, dead, late or lying may cost time, nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

from harness import PARAMS, PROMPT, T, answer, open_llm
from torch import Tensor

from kvconnect import KvCacheConnectorConfig, SamplingParams
from kvconnect.backend import Backend, Capabilities, Child, StoredBlock
from kvconnect.keys import BlockKey


class DictBackend(Backend):
    """Frames in a dictionary; the faulty ones below inherit what works."""

    capabilities = Capabilities(enumerable=True)

    def __init__(self) -> None:
        self.frames: dict[BlockKey, Tensor] = {}
        self.blocks: dict[BlockKey | None, list[Child]] = {}

    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.frames), len(keys))

    async def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        for i, (key, buffer) in enumerate(zip(keys, into, strict=True)):
            if key not in self.frames:
                return i
            buffer.copy_(self.frames[key])
        return len(keys)

    async def save(self, blocks: Sequence[StoredBlock]) -> int:
        for block in blocks:
            self.frames[block.key] = block.data.clone()
            if block.tokens is not None:
                self.blocks.setdefault(block.parent, []).append(Child(block.key, block.tokens))
        return len(blocks)

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self.frames.pop(key, None)

    async def children(self, key: BlockKey | None) -> Sequence[Child]:
        return [child for child in self.blocks.get(key, ()) if child.key in self.frames]


class RaisesOnLoad(DictBackend):
    """Says yes, then fails."""

    async def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        raise RuntimeError("load")


def test_a_tail_that_does_not_load_into_a_full_pool(model: Path) -> None:
    prompt = PROMPT[: 3 * T + 10]
    other = [*prompt[:-2], 3, 4]
    few = SamplingParams(max_tokens=4, ignore_eos=True)
    # Device and store have the other's tail; the pool has no block left to copy the device's.
    with open_llm(model, RaisesOnLoad(), max_tokens=4 * T) as llm:
        llm.generate([prompt], few)
        got = llm.generate([other], few)[0].output_token_ids
    with open_llm(model) as llm:
        assert got == llm.generate([other], few)[0].output_token_ids


class LoadsLate(DictBackend):
    """Sits on every load until it is let go, and writes into its buffers only then."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()
        self.go = threading.Event()

    async def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        self.asked.set()
        await asyncio.to_thread(self.go.wait)
        for buffer in into:
            buffer.fill_(0xA5)
        return len(keys)


def test_a_load_that_writes_after_its_deadline_touches_nobody(
    model: Path, expected: list[int]
) -> None:
    backend = LoadsLate()
    answer(model, backend)
    config = KvCacheConnectorConfig(backend=backend, load_timeout_s=0.3, save_timeout_s=1)
    others = [PROMPT[i:] for i in range(1, 5)]
    alone = [answer(model, prompt=prompt).output_token_ids for prompt in others]
    with open_llm(model, config) as llm:
        try:
            assert list(llm.generate([PROMPT], PARAMS)[0].output_token_ids) == expected
            handles = [llm.submit(prompt, PARAMS) for prompt in others]
        finally:
            backend.go.set()
        assert [handle.result(60).output_token_ids for handle in handles] == alone
        assert list(llm.generate([PROMPT], PARAMS)[0].output_token_ids) == expected


def test_who_waits_for_the_blocks_of_an_aborted_load_gets_them(
    model: Path, expected: list[int]
) -> None:
    backend = LoadsLate()
    answer(model, backend)
    # Room for one of them: the second waits for what the first one's load still holds.
    with open_llm(model, backend, max_tokens=len(PROMPT) + PARAMS.max_tokens) as llm:
        try:
            loading = llm.submit(PROMPT, PARAMS)
            assert backend.asked.wait(60)
            waiting = llm.submit(PROMPT, PARAMS.model_copy(update={"max_tokens": 23}))
            loading.abort()
            assert loading.result(60).finish_reason == "abort"
        finally:
            backend.go.set()
        assert list(waiting.result(60).output_token_ids) == expected[:23]
