"""Which offers of a connector are taken: it is asked once for each admission, loads are bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import recording
from bench_engine import BenchEngine, PlainKv, llm_args, reference
from bench_engine import T as BENCH_T
from recording import Script, never
from waiting import until

from kvconnect import LLM, KvCacheConfig, SamplingParams
from kvconnect.connector.runtime.admission import LoadAdmission
from kvconnect.connector.runtime.reporting import RequestRecord
from kvconnect.connector.runtime.request_errors import RequestErrors
from kvconnect.errors import DuplicateRequest
from kvconnect.keys import BlockKey
from kvconnect.request import LlmRequest

T = 16
POOL = 40
LONG, SHORT = 6 * T + 3, 5  # tokens; 7 blocks and one
ONE = SamplingParams(max_tokens=1)


def prompt(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(1, 250, length)]


# ---------------------------------------------------------------------- asked once, told once


def bench_prompt(first: int) -> list[int]:
    return list(range(first, first + 6 * BENCH_T + 2))


def about(script: Script, request: LlmRequest) -> list[str]:
    """The calls of its admissions."""
    names = ("get_num_new_matched_tokens", "update_state_after_alloc")
    return [call[0] for call in script.calls if call[0] in names and call[1] == request.request_id]


ASKED_ONCE = ["get_num_new_matched_tokens", "update_state_after_alloc"]


@pytest.mark.parametrize("is_async", [True, False])
def test_while_late_saves_are_held_it_is_asked_and_its_answer_dropped(
    script: Script, is_async: bool
) -> None:
    script.keep, script.finished = (lambda _: True), never
    config = recording.config(save_timeout_s=0.01)
    with BenchEngine(llm_args(config), kv=PlainKv(40)) as bench:
        first = bench.submit(bench_prompt(1))
        bench.run()
        assert bench.kv.get_num_free_blocks() == 40 - 7  # of 10 % that stop loads
        script.match = lambda *_: (5 * BENCH_T, is_async)
        second = bench.submit(bench_prompt(1))
        bench.run()
        assert about(script, first) == about(script, second) == ASKED_ONCE
        assert second.num_connector_matched_tokens == 0
        assert second.tokens.view[-1] == reference(bench_prompt(1))[0]
        assert not bench.store_tokens[second.request_id]


def test_an_id_may_be_returned_whose_offer_was_dropped(script: Script) -> None:
    script.keep, script.finished = (lambda _: True), never
    config = recording.config(save_timeout_s=0.01)
    with BenchEngine(llm_args(config), kv=PlainKv(40)) as bench:
        bench.submit(bench_prompt(1))
        bench.run()
        script.match = lambda *_: (5 * BENCH_T, True)
        second = bench.submit(bench_prompt(1), 3)
        bench.step()
        script.finished = lambda *_: ([], [second.request_id])
        bench.step()
        script.finished = never
        bench.run()
        assert second.tokens.view[-3:].tolist() == reference(bench_prompt(1), 3)


def test_one_that_ends_before_its_load_starts_takes_no_room(script: Script) -> None:
    script.match = lambda *_: (5 * BENCH_T, True)
    with BenchEngine(llm_args(recording.config()), kv=PlainKv(40)) as bench:
        request = bench.submit(bench_prompt(1))
        bench.schedule()
        assert bench.manager._loads._num_loading() == 7
        bench.abort(request)
        assert bench.manager._loads._num_loading() == 0


@pytest.mark.parametrize("offered", [0, 2, 5, 10**6])
def test_what_is_taken_of_an_offer_is_told_before_the_blocks(script: Script, offered: int) -> None:
    told: list[int] = []
    script.match = lambda *_: (offered, False)
    with BenchEngine(llm_args(recording.config())) as bench:
        bench.kv.device_match = lambda _: BENCH_T + 2
        script.scheduler.update_state_after_alloc = lambda request, _: told.append(  # type: ignore[union-attr,method-assign]
            request.num_connector_matched_tokens
        )
        bench.submit(bench_prompt(1))
        bench.step()
    # Two of them are in the partial match of the device.
    assert told == [0 if offered <= 2 else min(offered, 5 * BENCH_T + 1)]


def test_a_request_id_is_refused_while_it_is_live_or_its_blocks_are_held(script: Script) -> None:
    script.match, script.finished = (lambda *_: (5 * BENCH_T, True)), never
    with BenchEngine(llm_args(recording.config())) as bench:
        request = bench.submit(bench_prompt(1))
        for _ in ("queued", "loading", "held"):
            with pytest.raises(DuplicateRequest, match=f"request {request.request_id}"):
                bench.manager.on_new_request(request)
            if bench.loading:
                bench.abort(request)
            elif bench.queue:
                bench.step()
        script.finished = lambda *_: ([], [request.request_id])
        bench.manager.end_step()
        bench.manager.on_new_request(request)
        bench.manager.request_finished(request, aborted=True)


# ---------------------------------------------------------------------- how much loads may hold


@pytest.fixture(scope="module")
def model(model_of: Callable[[str], Path]) -> Path:
    return model_of("llama")


@pytest.fixture(params=["guaranteed_no_evict", "max_utilization"])
def open_llm(
    model: Path, script: Script, request: pytest.FixtureRequest
) -> Iterator[Callable[..., LLM]]:
    opened: list[LLM] = []

    def open_one(**settings) -> LLM:
        cache = KvCacheConfig(tokens_per_block=T, max_tokens=POOL * T)
        config = recording.config(**settings)
        opened.append(LLM(model, kv_cache=cache, connector=config, scheduling=request.param))
        return opened[-1]

    yield open_one
    script.finished = lambda saving, loading: (saving, loading)
    for llm in opened:
        llm.close()


def offer_to_long_ones(request: LlmRequest, position: int) -> tuple[int, bool]:
    return (request.num_tokens - 1 - position, True) if request.prompt_len >= LONG else (0, False)


def loading(script: Script) -> list[int]:
    return [one.request_id for output in script.outputs for one in output.loading_requests]


def has_started(script: Script, number: int) -> bool:
    assert len(loading(script)) <= number
    return len(loading(script)) == number


def test_loads_that_never_end_leave_half_of_the_pool_to_others(
    open_llm: Callable[..., LLM], script: Script
) -> None:
    script.match, script.finished = offer_to_long_ones, never
    llm = open_llm()
    stuck = [llm.submit(prompt(LONG, seed), ONE) for seed in range(12)]
    for seed in range(30):
        llm.submit(prompt(SHORT, seed), ONE).result(60)
    stats = llm.stats()
    assert stats.max_blocks - stats.free_blocks == 14  # two of 7, of 20 that are half
    assert len(loading(script)) == stats.loading_requests == 2
    for one in stuck:
        one.abort()
    assert {one.result(60).finish_reason for one in stuck} == {"abort"}
    # Held for loads that were cancelled, and no more than half of the pool.
    assert llm.stats().max_blocks - llm.stats().free_blocks == 14
    for seed in range(100, 104):
        llm.submit(prompt(LONG, seed), ONE).result(60)
    assert len(loading(script)) == 2  # none starts beside those in quarantine


def test_a_load_that_had_to_wait_starts_when_another_has_ended(
    open_llm: Callable[..., LLM], script: Script
) -> None:
    ended: deque[int] = deque()
    script.match = offer_to_long_ones
    script.finished = lambda *_: ([], [ended.popleft()] if ended else [])
    llm = open_llm()
    handles = [llm.submit(prompt(LONG, seed), ONE) for seed in range(5)]
    for number in range(2, 7):
        until(partial(has_started, script, min(number, 5)))
        assert llm.stats().loading_requests <= 2
        ended.append(loading(script)[number - 2])
    for handle in handles:
        assert handle.result(60).reused_store_tokens == LONG - 1
    assert loading(script) == sorted(loading(script))  # first come, first served
    # Each was asked about once, and told of its blocks once.
    assert len(script.named("get_num_new_matched_tokens")) == 5
    assert len(script.named("update_state_after_alloc")) == 5


def test_a_load_that_is_larger_than_that_runs_alone(
    open_llm: Callable[..., LLM], script: Script
) -> None:
    script.match, script.finished = offer_to_long_ones, never
    llm = open_llm()
    large = llm.submit(prompt(25 * T, 1), ONE)
    others = [llm.submit(prompt(LONG, seed), ONE) for seed in range(2, 4)]
    llm.submit(prompt(SHORT, 1), ONE).result(60)
    assert len(loading(script)) == 1
    ended = loading(script)
    script.finished = lambda _, started: ([], [*started, *(ended and [ended.pop()])])
    assert large.result(60).reused_store_tokens == 25 * T - 1
    assert [one.result(60).reused_store_tokens for one in others] == [LONG - 1] * 2


def test_one_that_waits_too_long_is_computed(open_llm: Callable[..., LLM], script: Script) -> None:
    llm = open_llm(load_timeout_s=0.2)
    prompts = [prompt(LONG, seed) for seed in range(6)]
    expected = [llm.generate([one], ONE)[0].output_token_ids for one in prompts]
    llm._engine._kv.blocks.reset()
    script.match, script.finished = offer_to_long_ones, never
    handles = [llm.submit(one, ONE) for one in prompts]
    assert [one.result(60).output_token_ids for one in handles] == expected
    asked, told = "get_num_new_matched_tokens", "update_state_after_alloc"
    assert len(script.named(asked)) == len(script.named(told)) >= 12


# ---------------------------------------------------------------------- recurrent states


@pytest.mark.parametrize(("offered", "taken"), [(96, 96), (64, 64), (70, 0), (99, 0), (112, 0)])
def test_states_are_matched_at_the_end_of_a_block_alone(offered: int, taken: int) -> None:
    """A match that is cut off would end without states, or with those of other tokens."""
    admission = LoadAdmission(
        SimpleNamespace(get_max_resource_count=lambda: POOL, overlaps_loads=True),
        SimpleNamespace(quarantine=SimpleNamespace(holds=lambda *_: False, full=False)),
        recording.config(),
        errors=RequestErrors(),
        tokens_per_block=T,
        divisible=False,
        whole_blocks=True,
    )
    root = BlockKey(b"r" * 32)
    record = RequestRecord(
        LlmRequest(1, np.array(prompt(100, 1), np.int32), chain_root=root, tokens_per_block=T)
    )
    scheduler = SimpleNamespace(get_num_new_matched_tokens=lambda *_: (offered, False))
    assert admission.match(scheduler, record, 0).num_tokens == taken
    assert (record.match is None) == (taken == 0)


def test_room_is_waited_for_no_longer_than_a_load_may_take() -> None:
    def record(request_id: int) -> RequestRecord:
        tokens, root = np.array(prompt(100, 1), np.int32), BlockKey(b"r" * 32)
        return RequestRecord(LlmRequest(request_id, tokens, chain_root=root, tokens_per_block=T))

    quarantine = SimpleNamespace(holds=lambda *_: False, full=False, num_blocks=0)
    admission = LoadAdmission(
        SimpleNamespace(get_max_resource_count=lambda: 8, overlaps_loads=False),
        SimpleNamespace(quarantine=quarantine, loading_records=lambda: [record(1)]),
        recording.config(),
        errors=RequestErrors(),
        tokens_per_block=T,
        divisible=True,
    )
    scheduler = SimpleNamespace(get_num_new_matched_tokens=lambda *_: (64, True))
    waiting = record(2)
    assert admission.match(scheduler, waiting, 0).deferred
    assert waiting.waits_until is not None
    waiting.waits_until = 0.0
    found = admission.match(scheduler, waiting, 0)
    assert (found.deferred, found.num_tokens) == (False, 0)
