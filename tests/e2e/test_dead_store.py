"""A store that dies costs one request the lookup budget, once; it is used again soon after."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from harness import T, open_llm
from late_store import LateStore
from observed import slow
from torch import Tensor

from kvconnect import LLM, KvCacheConnectorConfig, SamplingParams
from kvconnect.backend import Capabilities, StoredBlock
from kvconnect.engine.request.output import RequestOutput
from kvconnect.keys import BlockKey
from kvconnect_bench.dead.run import told_of

BUDGET_S = 1.5
RECOVERY_S = 60.0
FEW = SamplingParams(max_tokens=2, ignore_eos=True)
PROMPTS = [
    [int(token) for token in np.random.default_rng(seed).integers(1, 250, 2 * T + 5)]
    for seed in range(40)
]


class Store(LateStore):
    """A dictionary that can be refused, black-holed or frozen while it is in use.

    Frozen calls are answered after the thaw; those of a black hole never are.
    """

    capabilities = Capabilities()

    def __init__(self) -> None:
        super().__init__()
        self.mode = "answers"
        self.calls = 0
        self._thawed = threading.Event()

    def fail(self, mode: str) -> None:
        self.mode = mode
        self._thawed.clear()

    def recover(self) -> None:
        self.mode = "answers"
        self._thawed.set()

    async def _act(self) -> None:
        self.calls += 1
        if self.mode == "refused":
            raise ConnectionRefusedError("nobody there")
        if self.mode == "black-holed":
            await asyncio.Event().wait()
        if self.mode == "frozen":
            while not self._thawed.is_set():  # noqa: ASYNC110  set on another thread
                await asyncio.sleep(0.005)

    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        await self._act()
        return await super().lookup(keys)

    async def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        await self._act()
        return await super().load(keys, into)

    async def save(self, blocks: Sequence[StoredBlock]) -> int:
        await self._act()
        return await super().save(blocks)


@pytest.fixture(scope="module")
def known(model: Path) -> tuple[dict[BlockKey, Tensor], list[list[int]]]:
    """What a store holds that has seen `PROMPTS`, and the answers."""
    store = Store()
    with open_llm(model, store) as llm:
        outputs = llm.generate(PROMPTS, FEW)
    return store.frames, [list(output.output_token_ids) for output in outputs]


def ask(llm: LLM, number: int, answers: list[list[int]]) -> RequestOutput:
    (output,) = llm.generate([PROMPTS[number]], FEW)
    assert list(output.output_token_ids) == answers[number]
    return output


def seconds(llm: LLM, numbers: Sequence[int], answers: list[list[int]]) -> float:
    started = time.monotonic()
    for number in numbers:
        ask(llm, number, answers)
    return time.monotonic() - started


@pytest.mark.parametrize(
    "mode",
    # Real servers: test_dead_servers.py.
    ["refused", *slow("black-holed", "frozen")],
)
def test_a_dead_store_costs_one_request_its_budget_and_is_used_again(
    model: Path, known: tuple[dict[BlockKey, Tensor], list[list[int]]], mode: str
) -> None:
    frames, answers = known
    store = Store()
    store.frames = dict(frames)
    config = KvCacheConnectorConfig(
        backend=store,
        lookup_timeout_ms=1000 * BUDGET_S,
        load_timeout_s=BUDGET_S,
        save_timeout_s=BUDGET_S,
        overlap_loads=False,
    )
    with (
        told_of("store.breaker.opened") as opened,
        told_of("store.breaker.closed") as closed,
        open_llm(model, config) as llm,
    ):
        assert ask(llm, 0, answers).reused_store_tokens > 0
        store.fail(mode)
        ask(llm, 1, answers)  # may wait for the budget
        # After it nobody waits, though the breaker may still be closed: all ten of them together
        # do not take what nine of them would wait.
        assert seconds(llm, range(2, 12), answers) < 9 * BUDGET_S
        assert opened.wait(RECOVERY_S)
        guard = llm._engine._connector._scheduler._finding.store.backend
        deadline = time.monotonic() + RECOVERY_S
        while guard.available:  # the breaker of saves may have been the first
            assert time.monotonic() < deadline
            time.sleep(0.01)
        calls = store.calls
        assert seconds(llm, range(12, 22), answers) < 9 * BUDGET_S
        # Neither lookups nor saves reached the store: only its own probes do.
        assert store.calls - calls <= 3
        store.recover()
        assert closed.wait(RECOVERY_S)
        deadline = time.monotonic() + RECOVERY_S
        number = 22
        while not ask(llm, number, answers).reused_store_tokens:
            assert time.monotonic() < deadline
            number += 1
            assert number < len(PROMPTS)


def test_before_the_breaker_opens_recovery_needs_no_request(
    model: Path, known: tuple[dict[BlockKey, Tensor], list[list[int]]]
) -> None:
    frames, answers = known
    store = Store()
    store.frames = dict(frames)
    config = KvCacheConnectorConfig(
        backend=store, lookup_timeout_ms=1000 * BUDGET_S, overlap_loads=False
    )
    with open_llm(model, config) as llm, told_of("connector.patience.lost") as lost:
        store.fail("frozen")
        ask(llm, 0, answers)
        assert lost.is_set()
        with told_of("connector.patience.found") as found:
            store.recover()
            assert found.wait(RECOVERY_S)
        assert ask(llm, 1, answers).reused_store_tokens > 0
