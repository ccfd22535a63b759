"""Prompts whose end is loaded while their beginning is computed: the tokens are the same."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from beside import (
    FEW_SHARED,
    GREEDY,
    MANY_SHARED,
    PROMPT,
    PROMPTS,
    STORMY,
    Arrivals,
    Beside,
    Storm,
    T,
    check,
    check_nothing_is_left,
    connector,
    loads,
    nothing,
    send_back_once,
    stop_at,
    until,
    whole_blocks,
    words,
    worker,
)
from late_store import LateStore
from observed import check_idle

from kvconnect import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams
from kvconnect.backends.guard.breaker import Breaker
from kvconnect.engine.beside_loads import BesideLoads
from kvconnect.engine.sampling.drafts import NgramSpeculation
from kvconnect.keys import BlockKey
from kvconnect.request import ExternalMatch, LlmRequest, RequestState, ScheduledBatch
from kvconnect.trace import metrics

TAILS = {
    "in a block": (12 * T + 5, True),
    "at its end": (12 * T + 5, False),
    "in the last": (12 * T, True),
}
"""Where a match ends: the length of the prompt, and whether the store has its tail."""


# ---------------------------------------------------------------------- what decides


@pytest.fixture
def beside(monkeypatch) -> Beside:
    return Beside(monkeypatch)


@pytest.fixture
def arrivals(monkeypatch) -> Arrivals:
    return Arrivals(monkeypatch)


# ---------------------------------------------------------------------- engines and their store


@pytest.fixture(scope="module")
def saved(llama: Path) -> LateStore:
    """A store that has every prompt of PROMPTS, and the tail of each."""
    store = LateStore()
    cache = KvCacheConfig(tokens_per_block=T, max_tokens=1024)
    with LLM(llama, kv_cache=cache, dtype="float64", connector=connector(store)) as llm:
        for prompt in PROMPTS:
            llm.generate(prompt, SamplingParams(max_tokens=1))
    return store


@pytest.fixture
def store(saved: LateStore) -> Iterator[LateStore]:
    store = LateStore()
    store.become(saved)
    store.frozen = True
    yield store
    store.release()


@pytest.fixture
def open_late(open_llm, llama, store) -> Callable[..., LLM]:
    """Opens engines that read `store` block by block, three blocks in a step."""

    def open_one(model: Path = llama, **how: object) -> LLM:
        how = {"max_num_tokens": 3 * T + 5, "tokens_per_block": T} | how
        llm = open_llm(model, connector=connector(store), **how)
        worker(llm)._access.call_blocks = 1
        return llm

    return open_one


def release_after_loads(llm: LLM, store: LateStore) -> None:
    """Answers all held calls after the first token of a request, whose load has ended."""
    engine = llm._engine
    step = engine.step

    def step_and_release() -> bool:
        worked = step()
        running = engine._scheduler.running
        if store.held and any(one.num_tokens > one.prompt_len for one in running):
            until(lambda: not loads(llm)._running)
            store.release()
            until(lambda: not loads(llm)._reads)
        return worked

    engine.step = step_and_release


# ---------------------------------------------------------------------- where they meet


@pytest.mark.parametrize("where", TAILS)
def test_at_every_block(where, store, open_late, beside, arrivals, reference, llama):
    length, has_tail = TAILS[where]
    prompt = PROMPT[:length]
    (expected,) = reference(llama, [prompt], 12)
    keys = store.keys_of(PROMPT)
    end = length - 1 if has_tail else 12 * T
    if not has_tail:
        del store.frames[keys.pop()]
    keys = keys[: -(-end // T)]
    llm = open_late()
    for came in range(len(keys) + 1):
        store.held = set(keys[: len(keys) - came])
        beside.decide = arrivals.after(llm, came)
        output = llm.generate(prompt, GREEDY)[0]
        check(output, expected, reused=end - min(end, (len(keys) - came) * T))
        check_nothing_is_left(llm, store)
    assert beside.asked > 13


def test_while_blocks_come_as_it_computes(store, open_late, beside, arrivals, reference, llama):
    """One block comes for every two that are computed."""
    keys = store.keys_of(PROMPT)
    llm = open_late(max_num_tokens=2 * T)
    store.held = set(keys)

    def decide(request: LlmRequest, budget: int) -> int:
        came = request.num_computed_tokens // (2 * T)
        store.release(keys[len(keys) - came :])
        return arrivals.after(llm, came)(request, budget)

    beside.decide = decide
    output = llm.generate(PROMPT, GREEDY)[0]
    # After eight blocks, four have come: 9 to 12. One more is computed.
    check(output, *reference(llama, [PROMPT], 12), reused=len(PROMPT) - 1 - 9 * T)
    check_nothing_is_left(llm, store)


def test_steps_that_are_smaller_than_a_block(store, open_late, beside, arrivals, reference, llama):
    keys = store.keys_of(PROMPT)
    store.held = set(keys[:-5])
    llm = open_late(max_num_tokens=3)

    def decide(request: LlmRequest, budget: int) -> int:
        left = request.loaded_from - request.num_computed_tokens
        return min(left, budget, arrivals.after(llm, 5)(request, T * budget))

    beside.decide = decide
    output = llm.generate(PROMPT, GREEDY)[0]
    check(output, *reference(llama, [PROMPT], 12), reused=len(PROMPT) - 1 - 8 * T)
    check_nothing_is_left(llm, store)


@pytest.mark.parametrize("num_tokens", [1, T - 1, T + 2])
@pytest.mark.parametrize("held", [1, 3])
def test_a_chunk_that_ends_in_a_block_that_has_come(
    held, num_tokens, store, open_late, beside, arrivals, reference, llama
):
    """Computing zeroes the rest of the block that it ends in: all of that block is computed."""
    keys = store.keys_of(PROMPT)
    store.held = set(keys[:held])
    llm = open_late(max_num_tokens=6 * T)

    def decide(request: LlmRequest, _budget: int) -> int:
        if request.num_computed_tokens:
            return 0
        arrivals.wait(loads(llm)._overlapping[request.request_id], len(keys) - held)
        return held * T + num_tokens  # whether or not the engine knows yet what has come

    beside.decide = decide
    output = llm.generate(PROMPT, GREEDY)[0]
    reused = len(PROMPT) - 1 - (held + -(-num_tokens // T)) * T
    check(output, *reference(llama, [PROMPT], 12), reused=reused)
    check_nothing_is_left(llm, store)


def test_the_progress_of_a_cancelled_load_is_not_that_of_the_next() -> None:
    request = LlmRequest(
        1, np.array(PROMPT, np.int32), chain_root=BlockKey(bytes(32)), tokens_per_block=T
    )
    request.load_end = request.loaded_from = 12 * T
    request.load_times = [(2 * T, 0.5)]  # came while the request waited to be admitted again
    labels = (("decision", "compute"),)
    before = metrics.by_labels().get(labels, {}).get("engine.load", 0)
    beside = BesideLoads(64, lambda: 1)
    beside.add_chunk(ScheduledBatch(), [request])
    request.num_computed_tokens = T
    beside.end(request)
    assert metrics.by_labels()[labels]["engine.load"] == before + 1


def test_a_first_token_does_not_wait_for_what_is_computed_beside_a_load(monkeypatch):
    first, second = (
        LlmRequest(
            number, np.array(PROMPT, np.int32), chain_root=BlockKey(bytes(32)), tokens_per_block=T
        )
        for number in range(2)
    )
    second.load_end = second.loaded_from = 12 * T
    paces = BesideLoads(1 << 10, lambda: 2)
    monkeypatch.setattr(paces, "chunk", lambda _, budget, **__: min(T, budget))
    paces.add_chunk(ScheduledBatch(), [second])
    steps = []
    for scheduled in (len(PROMPT), 1, T, 1, 1):
        first.num_computed_tokens = len(PROMPT) - max(scheduled, T + 1 if scheduled == T else 1)
        first.num_scheduled_tokens = scheduled
        batch = ScheduledBatch([first])
        paces.add_chunk(batch, [second])
        steps.append(second in batch.context_requests)
    # The third does not end the prompt; every second one that does has a chunk beside it.
    assert steps == [False, True, True, False, True]


def test_a_load_that_explores_is_not_ended_before_its_first_byte():
    """A store that became fast is measured beside the first step, and loads from then on."""
    paces = BesideLoads(1 << 10, lambda: 1)
    for size in (T, 100, 1 << 10):
        paces._steps.record(size, size * size / 2, 0.001 + size * 1e-3)
    paces._loads.record((T, 5.0), (100 * T, 500.0), piece=T, gap_s=5.0, total=100 * T)
    match = ExternalMatch(0, 12 * T, is_async=True, overlaps=True)
    worth = []
    for number in range(1, 5):
        request = LlmRequest(
            number, np.array(PROMPT, np.int32), chain_root=BlockKey(bytes(32)), tokens_per_block=T
        )
        worth.append(paces.is_worth(request, match))
    assert worth == [False, False, False, True]
    request.load_end = request.loaded_from = 12 * T
    assert not paces.add_chunk(ScheduledBatch(), [request])
    batch = ScheduledBatch()
    assert not paces.add_chunk(batch, [request])
    assert (batch.requests, request.num_scheduled_tokens) == ([request], 11 * T)
    request.num_computed_tokens = 11 * T
    request.load_times = [(11 * T, 0.001), (6 * T, 0.003), (0, 0.005)]
    paces.end(request)
    assert paces.is_worth(request, match)


def test_a_store_that_hangs_beside_steps_that_are_smaller_than_a_block(
    store, open_late, reference, llama
):
    store.held = set(store.keys_of(PROMPT))
    llm = open_late(max_num_tokens=3)
    output = llm.generate(PROMPT, GREEDY)[0]
    check(output, *reference(llama, [PROMPT], 12), reused=0)
    check_nothing_is_left(llm, store)


def test_behind_what_the_device_has(store, open_late, beside, arrivals, reference, llama):
    llm = open_late()
    beside.decide = nothing
    llm.generate(PROMPT[: 3 * T + 3], SamplingParams(max_tokens=1))
    keys = store.keys_of(PROMPT)
    store.held = set(keys[:8])
    beside.decide = arrivals.after(llm, 5)
    output = llm.generate(PROMPT, GREEDY)[0]
    check(output, *reference(llama, [PROMPT], 12), reused=len(PROMPT) - 1 - 8 * T)
    assert output.reused_device_tokens == 3 * T
    check_nothing_is_left(llm, store)


HOW = {
    "drafts": {"speculative": NgramSpeculation(num_draft_tokens=5, min_ngram_size=1)},
    "undivided": {"enable_chunked_prefill": False, "max_num_tokens": 16 * T},
    "one block a step": {"max_num_tokens": T},
    "preempting": {"scheduling": "max_utilization", "max_tokens": 18 * T},
}


@pytest.mark.parametrize("how", HOW)
def test_however_it_is_served(how, store, open_late, beside, arrivals, reference, llama):
    prompt = [*PROMPT[: 12 * T], *PROMPT[:5]]  # drafts find something
    (expected,) = reference(llama, [prompt], 12)
    llm = open_late(**HOW[how])
    for came in (0, 5, 12):
        store.held = set(store.keys_of(PROMPT)[: 12 - came])
        beside.decide = arrivals.after(llm, came)
        check(llm.generate(prompt, GREEDY)[0], expected, reused=came * T)
        check_nothing_is_left(llm, store)


@pytest.mark.parametrize("arch", ["deepseek_v3", "gpt_neox"])
def test_other_attention(arch, store, open_late, beside, arrivals, reference, model_of):
    """Keys and values of different sizes, and rotation of a part of them."""
    store.frames.clear()
    store.after.clear()
    store.frozen = False
    llm = open_late(model_of(arch))
    llm.generate(PROMPT, SamplingParams(max_tokens=1))
    until(lambda: len(store.keys_of(PROMPT)) == 13)  # the tail is saved at the end
    store.frozen = True
    for came in (0, 6, 13):
        until(llm.reset_prefix_cache)
        store.held = set(store.keys_of(PROMPT)[: 13 - came])
        beside.decide = arrivals.after(llm, came)
        end = len(PROMPT) - 1
        output = llm.generate(PROMPT, GREEDY)[0]
        check(
            output, *reference(model_of(arch), [PROMPT], 12), reused=end - min(end, (13 - came) * T)
        )
        check_nothing_is_left(llm, store)


@pytest.mark.parametrize("came", [0, 5, 13])
def test_a_prompt_without_an_answer(came, store, open_late, beside, arrivals, reference, llama):
    llm = open_late()
    store.held = set(store.keys_of(PROMPT)[: 13 - came])
    beside.decide = arrivals.after(llm, came)
    output = llm.generate(PROMPT, SamplingParams(max_tokens=0))[0]
    check(output, [], reused=len(PROMPT) - 1 - min(len(PROMPT) - 1, (13 - came) * T))
    store.frames.clear()
    output = llm.generate(PROMPT, GREEDY)[0]
    check(output, *reference(llama, [PROMPT], 12), reused=0)
    assert output.computed_tokens == 1
    check_nothing_is_left(llm, store)


# ---------------------------------------------------------------------- stores that fail


@pytest.mark.parametrize("how", ["lost", "broken", "failing"])
def test_what_is_behind_a_missing_block_is_used(
    how, saved, store, open_late, beside, reference, llama
):
    """What lies before it is computed, and saved anew."""
    (expected,) = reference(llama, [PROMPT], 12)
    keys = store.keys_of(PROMPT)
    store.frozen = False
    llm = open_late()
    for number, key in enumerate(keys):
        store.become(saved)
        frame = store.frames[key].clone()
        setattr(store, how, {key})
        beside.decide = nothing
        output = llm.generate(PROMPT, GREEDY)[0]
        end = len(PROMPT) - 1
        check(output, expected, reused=end - min(end, (number + 1) * T))
        check_nothing_is_left(llm, store)
        if how == "lost" and number < 12:
            until(lambda key=key: key in store.frames)
            assert torch.equal(store.frames[key], frame)


@pytest.mark.parametrize("number", [0, 3])
def test_a_missing_block_that_is_computed_meanwhile_is_saved_anew(
    number, store, open_late, beside, reference, llama
):
    """All others that the load still needs have come."""
    store.frozen = False
    keys = store.keys_of(PROMPT)
    store.lost, store.held = {keys[number]}, {keys[11]}
    llm = open_late()

    def decide(request: LlmRequest, budget: int) -> int:
        load = loads(llm)._overlapping.get(request.request_id)
        if load is None:
            return 0
        until(lambda: load.stop < len(load.order.blocks))
        if request.num_computed_tokens > number * T:
            store.release()
            until(lambda: load.ended)
            return 0
        return min(whole_blocks(request, budget), T)

    beside.decide = decide
    output = llm.generate(PROMPT, GREEDY)[0]
    check(output, *reference(llama, [PROMPT], 12), reused=len(PROMPT) - 1 - (number + 1) * T)
    until(lambda: keys[number] in store.frames)
    check_nothing_is_left(llm, store)


@pytest.mark.parametrize(("how", "number"), [("lost", 0), ("lost", 3), ("broken", 3)])
def test_a_missing_block_that_is_noticed_after_the_load_is_saved_anew(
    how, number, store, open_late, beside, arrivals, reference, llama
):
    """The answer for it comes once all tokens before what has come are computed."""
    store.frozen = False
    key = store.keys_of(PROMPT)[number]
    frame = store.frames[key].clone()
    setattr(store, how, {key})
    store.held = {key}
    llm = open_late()
    beside.decide = arrivals.after(llm, 12 - number)
    release_after_loads(llm, store)
    output = llm.generate(PROMPT, GREEDY)[0]
    check(output, *reference(llama, [PROMPT], 12), reused=len(PROMPT) - 1 - (number + 1) * T)
    assert not store.held
    check_nothing_is_left(llm, store)
    until(lambda: torch.equal(store.frames.get(key, frame[:0]), frame))


@pytest.mark.parametrize("noticed", ["before", "after"])
def test_a_missing_block_of_a_load_that_is_overtaken_is_saved_anew(
    noticed, store, open_late, beside, reference, llama
):
    """Nothing of the load comes, since its first block hangs."""
    store.frozen = False
    keys = store.keys_of(PROMPT)
    frame = store.frames[keys[9]].clone()
    store.lost, store.held = {keys[9]}, {keys[12], keys[9]}
    llm = open_late()

    def decide(request: LlmRequest, budget: int) -> int:
        load = loads(llm)._overlapping[request.request_id]
        until(lambda: load.next > 3)
        if noticed == "before":
            store.release({keys[9]})
            until(lambda: load.stop < len(load.order.blocks))
        return min(request.load_end + 1 - request.num_computed_tokens, budget)

    beside.decide = decide
    release_after_loads(llm, store)
    output = llm.generate(PROMPT, GREEDY)[0]
    check(output, *reference(llama, [PROMPT], 12), reused=0)
    assert not store.held
    check_nothing_is_left(llm, store)
    until(lambda: torch.equal(store.frames.get(keys[9], frame[:0]), frame))


@pytest.mark.parametrize("how", ["lost", "broken", "failing"])
def test_a_missing_block_is_found_while_it_computes(
    how, saved, store, open_late, beside, reference, llama
):
    (expected,) = reference(llama, [PROMPT], 12)
    llm = open_late()
    for key in store.keys_of(PROMPT):
        store.become(saved)
        setattr(store, how, {key})
        check(llm.generate(PROMPT, GREEDY)[0], expected)
        check_nothing_is_left(llm, store)
    assert beside.asked > 0


def test_a_store_that_hangs_is_not_waited_for_and_writes_nothing_later(
    store, open_late, beside, reference, llama
):
    llm = open_late()
    store.held = set(store.keys_of(PROMPT))

    def decide(request: LlmRequest, budget: int) -> int:
        assert store.waits.wait(60)
        return whole_blocks(request, budget)

    beside.decide = decide
    output = llm.generate(PROMPT, GREEDY)[0]
    check(output, *reference(llama, [PROMPT], 12), reused=0)
    until(llm.reset_prefix_cache)
    check_idle(llm)
    staging = worker(llm)._access.staging
    assert staging.num_free < staging.num_slots
    pool = llm._kv.pool_tensor()
    pool.fill_(12.5)
    store.release()
    until(lambda: staging.num_free == staging.num_slots)
    assert (pool == 12.5).all()
    check_nothing_is_left(llm, store)


# ---------------------------------------------------------------------- requests that end early


@pytest.mark.parametrize("computed", [0, 2, 7])
def test_aborted(computed, store, open_late, beside, reference, llama):
    llm = open_late()
    keys = store.keys_of(PROMPT)
    store.held = set(keys[:9])
    reached = threading.Event()
    beside.decide = stop_at(computed * T, reached)
    handle = llm.submit(PROMPT, GREEDY)
    assert reached.wait(60)
    handle.abort()
    assert handle.result(timeout=60).finish_reason == "abort"
    until(lambda: llm.stats().free_blocks == llm.stats().max_blocks)
    store.release()
    beside.decide = whole_blocks
    again = llm.generate(PROMPT, GREEDY)[0]
    check(again, *reference(llama, [PROMPT], 12))
    assert again.reused_device_tokens == computed * T  # and none of what was loaded
    check_nothing_is_left(llm, store)


@pytest.mark.parametrize("store_is", ["there", "gone"])
@pytest.mark.parametrize("state", [RequestState.LOADING, RequestState.CONTEXT])
def test_preempted(state, store_is, store, open_late, beside, reference, llama):
    """While it loads, and after a load that brought only the end."""
    keys = store.keys_of(PROMPT)
    llm = open_late(max_num_tokens=T)
    store.failing = {keys[8]}
    if state is RequestState.LOADING:
        store.held = set(keys)
    beside.decide = whole_blocks if state is RequestState.LOADING else nothing

    def is_due(request: LlmRequest) -> bool:
        if request.state is not state or request.num_computed_tokens != 3 * T:
            return False
        assert request.load_end == len(PROMPT) - 1
        assert request.loaded_from == (9 * T if state is RequestState.CONTEXT else request.load_end)
        store.failing = set()
        store.release()
        if store_is == "gone":
            store.frames.clear()
        return True

    sent = send_back_once(llm, is_due)
    output = llm.generate(PROMPT, GREEDY)[0]
    assert len(sent) == output.preemptions == 1
    assert list(output.output_token_ids) == reference(llama, [PROMPT], 12)[0]
    if store_is == "gone":
        assert output.reused_store_tokens == 0
    check_nothing_is_left(llm, store)


def test_a_running_request_takes_the_blocks_of_one_whose_store_hangs(
    store, open_late, beside, reference, llama
):
    """The one that loads cannot go on without them either, but it came last."""
    llm = open_late(scheduling="max_utilization", max_tokens=17 * T)
    long = SamplingParams(max_tokens=6 * T, ignore_eos=True)
    beside.decide = nothing
    store.held = set(store.keys_of(PROMPT))
    running = llm.submit(words(2 * T, 9), long)
    next(running.stream())
    loading = llm.submit(PROMPT, GREEDY)
    assert len(running.result(timeout=60).output_token_ids) == 6 * T
    beside.decide = whole_blocks
    llm._thread._inbox.ring()
    assert list(loading.result(60).output_token_ids) == reference(llama, [PROMPT], 12)[0]
    check_nothing_is_left(llm, store)


# ---------------------------------------------------------------------- several requests


@pytest.mark.parametrize("other", [FEW_SHARED, MANY_SHARED])
def test_one_that_begins_alike_while_the_first_loads(
    other, store, open_late, beside, reference, llama
):
    llm = open_late()
    keys = store.keys_of(PROMPT)
    store.held = {*keys[:6], *store.keys_of(other)[4:]}
    reached = threading.Event()
    beside.decide = stop_at(4 * T, reached)
    first = llm.submit(PROMPT, GREEDY)
    assert reached.wait(60)
    second = llm.submit(other, GREEDY)
    beside.decide = whole_blocks
    outputs = [first.result(60), second.result(60)]
    for output, expected in zip(outputs, reference(llama, [PROMPT, other], 12), strict=True):
        check(output, expected)
    # It reuses what the first computed or loaded.
    assert outputs[1].reused_device_tokens >= min(4 * T, len(other) // T * T) - T
    check_nothing_is_left(llm, store)


def test_all_at_once(store, open_late, beside, reference, llama):
    llm = open_late()
    for _ in range(3):
        store.held = set(random.Random(1).sample(sorted(store.frames), len(store.frames) // 2))
        outputs = llm.generate(PROMPTS, GREEDY)
        for output, expected in zip(outputs, reference(llama, PROMPTS, 12), strict=True):
            check(output, expected)
        check_nothing_is_left(llm, store)


# ---------------------------------------------------------------------- what does not overlap


def test_switched_off(open_llm, llama, store, beside, reference):
    config = KvCacheConnectorConfig(backend=store, lookup_timeout_ms=60_000, overlap_loads=False)
    llm = open_llm(llama, tokens_per_block=T, connector=config)
    check(llm.generate(PROMPT, GREEDY)[0], *reference(llama, [PROMPT], 12), reused=len(PROMPT) - 1)
    assert beside.asked == 0


# ---------------------------------------------------------------------- two ranks


RANKS = {
    "tensor_parallel_size": 2,
    "kv_cache": KvCacheConfig(tokens_per_block=T, max_tokens=60 * T),
    "dtype": "float64",
    "device": "cpu",
    "max_num_tokens": 3 * T,
}
UNEVEN = [PROMPT, words(9 * T + 2, 5)]
STOPPED = [words(12 * T + 5, seed) for seed in (7, 8, 9)]


@pytest.fixture(scope="module")
def saved_by_ranks(model_of, reference, tmp_path_factory) -> tuple[str, float]:
    """The URL of a store that has these prompts, and the seconds that one takes without it."""
    url = f"disk://{tmp_path_factory.mktemp('ranks')}/store?capacity=64MiB"
    asked, seconds = [*UNEVEN, *STOPPED], []
    with LLM(model_of("llama"), connector=KvCacheConnectorConfig(url=url), **RANKS) as llm:
        for prompt, expected in zip(asked, reference(model_of("llama"), asked, 12), strict=True):
            began = time.monotonic()
            check(llm.generate(prompt, GREEDY)[0], expected, reused=0)
            seconds.append(time.monotonic() - began)
    return url, max(seconds)


def uneven_ranks(worker_class: str) -> KvCacheConnectorConfig:
    return KvCacheConnectorConfig(
        lookup_timeout_ms=60_000,
        load_timeout_s=600,
        overlap_loads=True,
        connector_module="uneven_ranks",
        connector_scheduler_class="Scheduler",
        connector_worker_class=worker_class,
    )


def test_ranks_go_on_from_what_the_slowest_has(
    saved_by_ranks, model_of, reference, beside, monkeypatch
):
    """See `uneven_ranks`."""
    monkeypatch.setenv("UNEVEN_STORE", saved_by_ranks[0])
    expected = reference(model_of("llama"), UNEVEN, 12)
    with LLM(model_of("llama"), connector=uneven_ranks("Worker"), **RANKS) as llm:
        beside.decide = lambda request, budget: min(T, whole_blocks(request, budget))
        first, second = (llm.generate(prompt, GREEDY)[0] for prompt in UNEVEN)
        check(first, expected[0])
        # The second rank got its blocks while the first six were computed, or seven; on a busy
        # machine the engine hears of them before.
        assert 4 * T <= first.reused_store_tokens < 11 * T
        check(second, expected[1])
        assert second.reused_store_tokens < 9 * T + 1  # one block of the second rank did not come
        assert beside.asked > 0
        until(llm.reset_prefix_cache)
        check_idle(llm)


def test_a_store_that_stops_on_one_rank_costs_no_more_than_computing(
    saved_by_ranks, model_of, reference, monkeypatch
):
    """See `uneven_ranks`: of the first prompt five blocks come on one rank, all on the other."""
    url, computed_s = saved_by_ranks
    monkeypatch.setenv("UNEVEN_STORE", url)
    expected = reference(model_of("llama"), STOPPED, 12)

    def decide(request: LlmRequest, budget: int) -> int:
        if request.loaded_from > 8 * T:
            llm._thread._inbox.ring()
            return 0
        return whole_blocks(request, budget)

    with LLM(model_of("llama"), connector=uneven_ranks("StoppingWorker"), **RANKS) as llm:
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


# ---------------------------------------------------------------------- anything at any time


@pytest.fixture(scope="module", params=STORMY)
def storm(request, llama: Path) -> Iterator[Storm]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Breaker, "open", lambda *_: None)  # the store is asked all the time
        beside, store = Beside(patch), LateStore()
        cache = KvCacheConfig(tokens_per_block=T, max_tokens=34 * T)
        how = {"kv_cache": cache, "dtype": "float64", "connector": connector(store)}
        with LLM(llama, **how, **STORMY[request.param]) as llm:
            yield Storm(llm, store, beside)
            store.release()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_whatever_happens_no_token_is_wrong_and_nothing_is_left(
    seed, storm, saved, reference, llama
):
    expected = dict(enumerate(reference(llama, PROMPTS, 12)))
    for number in range(1000 if seed else 8):
        storm.run(1000 * seed + number, saved, expected)
