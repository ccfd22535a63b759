"""Two ranks compute beside a load that is slow, or stops, on one of them; see `uneven_ranks`."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from beside import GREEDY, PROMPT, Beside, T, cache, check, slow, until, whole_blocks, worker
from observed import check_idle, words

from kvconnect import LLM, KvCacheConnectorConfig
from kvconnect.request import LlmRequest

UNEVEN = [PROMPT, words(9 * T + 2, 5)]
STOPPED = [words(12 * T + 5, seed) for seed in (7, 8, 9)]


@pytest.fixture
def open_uneven(model, open_llm, reference, tmp_path, monkeypatch) -> Callable[..., LLM]:
    """Opens two ranks whose store has these prompts; also gives the seconds of the slowest one."""

    def open_one(worker_class: str, prompts: list[list[int]]) -> tuple[LLM, float]:
        monkeypatch.setenv("UNEVEN_STORE", f"disk://{tmp_path}/store?capacity=64MiB")
        connector = KvCacheConnectorConfig(
            lookup_timeout_ms=60_000,
            load_timeout_s=600,
            overlap_loads=True,
            connector_module="uneven_ranks",
            connector_scheduler_class="Scheduler",
            connector_worker_class=worker_class,
        )
        two = {"tensor_parallel_size": 2, "device": "cpu", "max_num_tokens": 3 * T}
        llm = open_llm(model, kv_cache=cache(max_tokens=60 * T), connector=connector, **two)
        seconds = []
        for prompt, expected in zip(prompts, reference(model, prompts, 12), strict=True):
            began = time.monotonic()
            check(llm.generate(prompt, GREEDY)[0], expected, reused=0)
            seconds.append(time.monotonic() - began)
        until(llm.reset_prefix_cache)  # all is saved
        return llm, max(seconds)

    return open_one


@pytest.mark.parametrize("model", ["llama", *slow("mixed", "qwen3_next")], indirect=True)
def test_ranks_go_on_from_what_the_slowest_has(model, open_uneven, reference, monkeypatch):
    llm, _ = open_uneven("Worker", UNEVEN)
    expected = reference(model, UNEVEN, 12)
    beside = Beside(monkeypatch)
    beside.decide = lambda request, budget: min(T, whole_blocks(request, budget))
    first, second = (llm.generate(prompt, GREEDY)[0] for prompt in UNEVEN)
    check(first, expected[0])
    # The second rank got a block with each step, of several pools in turn. That of a single pool
    # was computed up to block 6, or 7; on a busy machine the engine hears of it before.
    assert (4 * T if "llama" in model.name else 1) <= first.reused_store_tokens < 11 * T
    check(second, expected[1])
    assert second.reused_store_tokens < 9 * T + 1  # one block of the second rank did not come
    assert beside.asked > 0
    until(llm.reset_prefix_cache)
    check_idle(llm)


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_a_store_that_stops_on_one_rank_costs_no_more_than_computing(
    model, open_uneven, reference, monkeypatch
):
    """Of the first prompt five blocks come on one rank, all on the other."""
    llm, computed_s = open_uneven("StoppingWorker", STOPPED)
    expected = reference(model, STOPPED, 12)

    def decide(request: LlmRequest, budget: int) -> int:
        if request.loaded_from > 8 * T:
            llm._thread._inbox.ring()
            return 0
        return whole_blocks(request, budget)

    with monkeypatch.context() as patch:
        Beside(patch).decide = decide
        output = llm.generate(STOPPED[0], GREEDY)[0]
        check(output, expected[0], reused=len(STOPPED[0]) - 1 - 8 * T)
    for number in (1, 2):
        began = time.monotonic()
        output = llm.generate(STOPPED[number], GREEDY)[0]
        assert time.monotonic() - began < 2 * computed_s + 1
        check(output, expected[number], reused=0)
    assert worker(llm)._num_loads == 3
    until(llm.reset_prefix_cache)
    check_idle(llm)
