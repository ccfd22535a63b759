"""SGLang's own controller prefetches no pages whose load takes longer than computing them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed here: make test-engines")

from load_clock import FAST, SLOW, Decisions, LoadClock
from real_controller import Server
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang_pools import PAGE

from kvconnect.integrations.sglang.steps import steps

pytestmark = pytest.mark.usefixtures("one_rank")

PROMPTS = [list(range(1000 * n, 1000 * n + 12 * PAGE)) for n in range(1, 6)]


@pytest.fixture
def clock() -> LoadClock:
    return LoadClock()


@pytest.fixture
def compute(clock: LoadClock, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A batch of so many tokens in SGLang's scheduler, whose model is the clock."""

    def run_batch(_: Any, batch: ScheduleBatch) -> None:
        clock.computes(sum(batch.extend_lens))

    monkeypatch.setattr(Scheduler, "run_batch", run_batch)
    monkeypatch.setattr(Scheduler, "process_batch_result", lambda *_: None)
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(steps, "_hooked", None)
    scheduler = Scheduler.__new__(Scheduler)

    def compute(num_tokens: int) -> None:
        batch = ScheduleBatch(reqs=[None])
        batch.forward_mode = ForwardMode.EXTEND
        batch.extend_lens, batch.prefix_lens = [num_tokens], [0]
        scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        clock.now += 60.0

    return compute


@pytest.fixture
def server(
    compute: Callable[[int], None], clock: LoadClock, model: Path, tmp_path: Path
) -> Iterator[tuple[Server, list[list[torch.Tensor]]]]:
    """One that has computed some batches, and the pages of `PROMPTS`, which its store has."""
    with ExitStack() as undo:
        made = Server(
            model,
            f"disk://{tmp_path}/store?capacity=64MiB",
            "page_head",
            is_mla=False,
            load_decisions=True,
            lookup_timeout_ms=60_000,
            load_timeout_s=60,
        )
        undo.callback(made.close)
        storage = made.controller.storage_backend
        clock.set_in(storage._choice)
        access = storage._access
        access.load = clock.times(access.load, lambda keys, _: len(keys) * PAGE)
        for tokens in (200, 1, 50, 200, 1):
            compute(tokens)
        written = [made.back_up(prompt) for prompt in PROMPTS]
        made.flush()
        yield made, written
        made.check_alive()


def prefetched(server: Server, written: list[list[torch.Tensor]]) -> list[int]:
    """The pages of each prompt that are prefetched, which hold what was written."""
    numbers = []
    for prompt, pages in zip(PROMPTS, written, strict=True):
        got = server.prefetch(prompt)
        assert all(map(torch.equal, got, pages))
        numbers.append(len(got))
    return numbers


def test_a_fast_store_is_asked(server, clock):
    clock.token_s, seen = FAST, Decisions()
    assert prefetched(*server) == [12] * 5
    assert seen() == {"load": 5}


def test_a_slow_store_is_asked_once_and_again_after_a_hundred_prompts(server, clock):
    clock.token_s, seen = SLOW, Decisions()
    assert prefetched(*server) == [12, 0, 0, 0, 0]
    assert seen() == {"load": 1, "compute": 4}
    clock.token_s = FAST
    for _ in range(19):
        assert prefetched(*server) == [0] * 5
    assert prefetched(*server) == [12] * 5
    assert seen() == {"load": 5, "compute": 95}
