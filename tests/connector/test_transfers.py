"""Loads and saves that succeed, fail, time out or are cancelled: each ends once, none does harm."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import recording
from bench_engine import BenchEngine, PlainKv, T, llm_args, reference, sound_blocks
from recording import Script, fail, never

from kvconnect.connector.data import Direction, TransferFailure
from kvconnect.connector.runtime.transfers import Transfers, TransferState
from kvconnect.errors import ConnectorContractError
from kvconnect.request import LlmRequest, RequestState

PROMPT = list(range(1, 6 * T + 3))
ANSWER = reference(PROMPT, 3)
LATE = {"load_timeout_s": 0.05, "save_timeout_s": 0.05}


def engine(kv: PlainKv | None = None, **settings) -> BenchEngine:
    return BenchEngine(llm_args(recording.config(**settings)), kv=kv)


def tokens(request: LlmRequest) -> list[int]:
    return request.tokens.view[request.prompt_len :].tolist()


def num_loads(script: Script) -> int:
    """How many loads in the background were started."""
    return sum(len(output.loading_requests) for output in script.outputs)


def wait_for_deadline(bench: BenchEngine) -> None:
    """Step until something failed or ended."""
    while not (bench.outcomes and (bench.outcomes[-1].failed or bench.outcomes[-1].saved)):
        if not bench.step():
            bench.sleep()


# ---------------------------------------------------------------------- failed loads


@pytest.mark.parametrize("valid", [0, 3, T, 2 * T + 1])
def test_a_load_in_the_background_that_fails_is_computed_from_the_valid_position(
    script: Script, valid: int
) -> None:
    script.match = lambda *_: (5 * T, True)
    script.finished = never
    with engine() as bench:
        request = bench.submit(PROMPT, 3)
        # What a worker would have loaded: right up to the valid position, anything beyond.
        blocks = sound_blocks(PROMPT)
        blocks.view(-1, 3, 2, T)[valid // T, :, :, valid % T :] = 7.0
        blocks[valid // T + 1 :] = 7.0
        bench.kv.pool[: len(blocks)] = blocks
        script.failures = [fail(request, valid)]
        bench.run()
        assert tokens(request) == ANSWER
        assert script.named("load_failed") == [(request.request_id, valid)]
        assert script.outputs[1].new_requests[0].computed_position == valid
        assert bench.kv.get_num_free_blocks() == len(bench.kv.pool)


def test_a_synchronous_load_that_fails_after_the_last_layer_costs_the_step(script: Script) -> None:
    script.match = lambda *_: (5 * T, False)
    with engine() as bench:
        request = bench.submit(PROMPT, 3)
        script.failures = [fail(request, 0)]
        bench.step()
        assert tokens(request) == []  # nothing of the step was sampled
        assert request.num_computed_tokens == 0  # and nothing of it counts as valid
        bench.run()
        assert tokens(request) == ANSWER
        assert script.outputs[1].cached_requests[0].computed_position == 0


def test_a_failure_that_is_found_in_get_finished_is_taken_in_the_same_step(script: Script) -> None:
    script.match = lambda *_: (5 * T, True)
    with engine() as bench:
        request = bench.submit(PROMPT, 3)

        def finished(_saving: list[int], loading: list[int]) -> tuple[list[int], list[int]]:
            script.failures += [fail(request, 0) for _ in loading]
            return [], []

        script.finished = finished
        bench.step()
        assert bench.outcomes[-1].failed == {request.request_id: 0}
        bench.run()
        assert tokens(request) == ANSWER


def test_a_synchronous_load_that_fails_after_tokens_were_sampled_ends_the_engine(
    script: Script,
) -> None:
    """Its worker has until `get_failed` after the forward pass to say so."""
    script.match = lambda *_: (5 * T, False)
    with engine() as bench:
        request = bench.submit(PROMPT, 3)

        def finished(_saving: list[int], _loading: list[int]) -> tuple[list[int], list[int]]:
            script.failures = [fail(request, 0)]
            return [], []

        script.finished = finished
        with pytest.raises(ConnectorContractError, match="which has none"):
            bench.step()
        bench.running.clear()


def test_what_a_load_may_still_write_is_exchanged_and_comes_back_with_the_id(
    script: Script,
) -> None:
    script.match = lambda *_: (5 * T, True)
    script.finished = never
    kv = PlainKv(20)
    with engine(kv) as bench:
        request = bench.submit(PROMPT, 3)
        bench.step()
        old = list(kv.blocks[request.request_id])
        script.failures = [fail(request, 2 * T + 1, ended=False)]
        kv.pool[old[:2]] = sound_blocks(PROMPT)[:2]
        bench.step()
        fresh = kv.blocks[request.request_id]
        assert fresh[:2] == old[:2]  # what is valid stays
        assert not set(fresh[2:]) & set(old)
        assert bench.outcomes[-1].failed == {request.request_id: 2 * T}  # a whole block
        assert script.named("blocks_replaced") == [(request.request_id, fresh)]
        assert script.named("update_state_after_alloc") == [(request.request_id, old)]
        assert ("cancel", request.request_id) in script.calls
        kv.pool[old[2:]] = 666.0  # the late writer
        bench.run()
        assert tokens(request) == ANSWER
        assert script.outputs[1].new_requests[0].new_block_ids == fresh
        assert set(old[2:]).isdisjoint(kv.free_ids())
        script.finished = lambda *_: ([], [request.request_id])
        bench.manager.end_step()
        assert kv.get_num_free_blocks() == 20


def test_with_no_fresh_blocks_the_request_goes_back_to_the_queue(script: Script) -> None:
    script.match = lambda *_: (5 * T, True)
    script.finished = never
    kv = PlainKv(8)
    with engine(kv, max_quarantined_fraction=1.0) as bench:
        request = bench.submit(PROMPT, 3)
        bench.step()
        old = list(kv.blocks[request.request_id])
        script.failures = [fail(request, 0, ended=False)]
        bench.step()
        assert bench.outcomes[-1].requeue == {request.request_id}
        assert script.named("request_reset") == [(request.request_id,)]
        assert request.state is RequestState.QUEUED
        bench.step()
        assert request.state is RequestState.QUEUED  # there is no room beside the old blocks
        kv.pool[old] = 666.0
        script.match = lambda *_: (0, False)
        script.finished = lambda *_: ([], [request.request_id])
        bench.manager.end_step()
        script.finished = never
        bench.run()
        assert tokens(request) == ANSWER
        # While its old load was held it was not asked for, since then it is.
        assert len(script.named("get_num_new_matched_tokens")) == 2


def test_while_its_blocks_are_held_a_request_starts_no_second_load(script: Script) -> None:
    script.match = lambda *_: (T, True)
    script.finished = never
    with engine(max_quarantined_fraction=1.0) as bench:
        request = bench.submit(PROMPT, 3)
        bench.step()
        script.failures = [fail(request, 0, ended=False)]
        bench.step()
        bench.step()
        bench.preempt(request)
        bench.run()
        # It is asked about, and the answer is dropped.
        assert len(script.named("get_num_new_matched_tokens")) == 2
        assert request.num_connector_matched_tokens == 0
        assert num_loads(script) == 1
        assert tokens(request) == ANSWER


def test_too_many_blocks_held_back_stop_new_loads(script: Script) -> None:
    script.match = lambda *_: (5 * T, True)
    script.finished = never
    with engine(PlainKv(40), max_quarantined_fraction=0.1) as bench:
        first = bench.submit(PROMPT, 3)
        bench.step()
        script.failures = [fail(first, 0, ended=False)]
        bench.run()
        second = bench.submit(PROMPT, 3)
        bench.run()
        assert tokens(first) == tokens(second) == ANSWER
        assert num_loads(script) == 1
        asked = script.named("get_num_new_matched_tokens")
        allocated = script.named("update_state_after_alloc")
        assert [one[0] for one in asked] == [first.request_id, second.request_id]
        assert [one[0] for one in allocated] == [first.request_id, second.request_id]


# ---------------------------------------------------------------------- deadlines


def test_a_load_that_never_ends_times_out_and_late_writes_do_no_harm(script: Script) -> None:
    script.match = lambda *_: (5 * T, True)
    script.finished = never
    kv = PlainKv(20)
    with engine(kv, **LATE) as bench:
        request = bench.submit(PROMPT, 3)
        bench.step()
        old = list(kv.blocks[request.request_id])
        stop = threading.Event()

        def write_late() -> None:
            while not stop.is_set():
                kv.pool[old] = 666.0

        writer = threading.Thread(target=write_late)
        writer.start()
        try:
            bench.run()
            other = bench.submit(PROMPT, 3)  # canary: gets blocks while the writer still writes
            bench.run()
        finally:
            stop.set()
            writer.join()
        assert tokens(request) == tokens(other) == ANSWER
        assert bench.outcomes[-1] is not None
        script.finished = lambda *_: ([], [request.request_id])
        bench.manager.end_step()
        assert kv.get_num_free_blocks() == 20


def test_a_load_that_ends_in_the_step_in_which_its_deadline_passes_has_succeeded(
    script: Script,
) -> None:
    """The worker is asked what ended before a deadline counts, also beside other requests."""
    answers = iter([(5 * T, True), (0, False)])
    script.match, script.finished = (lambda *_: next(answers)), never
    with engine() as bench:
        request, other = bench.submit(PROMPT, 3), bench.submit([9, *PROMPT], 3)
        bench.step()
        load = bench.manager._ledger.loads.get(request.request_id)
        assert load is not None
        load.deadline = 0.0
        script.finished = lambda *_: ([], [request.request_id])
        bench.step()
        assert bench.outcomes[-1].loaded == {request.request_id: 5 * T}
        script.finished = never
        bench.abort(request)
        bench.run()
        assert tokens(other) == reference([9, *PROMPT], 3)


def test_a_scheduler_hears_of_its_workers_once_a_step(script: Script) -> None:
    heard: list[object] = []
    with engine() as bench:
        assert script.scheduler is not None
        assert script.worker is not None
        script.scheduler.update_from_workers = heard.append  # type: ignore[method-assign]
        numbers = itertools.count()
        script.worker.build_worker_meta = numbers.__next__  # type: ignore[method-assign]
        bench.submit(PROMPT, 3)
        bench.step()
        bench.idle_step()
    assert heard == [[0], [1]]


def test_a_late_return_of_a_failed_load_is_ignored(
    script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    script.match = lambda *_: (5 * T, True)
    script.finished = never
    with engine() as bench:
        request = bench.submit(PROMPT, 3)
        script.failures = [fail(request, 0)]
        bench.step()
        script.finished = lambda *_: ([], [request.request_id])
        bench.step()
        script.finished = never
        bench.run()
        assert tokens(request) == ANSWER


def test_an_unfinished_save_times_out_and_its_blocks_stay_until_it_is_over(script: Script) -> None:
    script.keep = lambda _: True
    script.finished = never
    kv = PlainKv(20)
    with engine(kv, **LATE) as bench:
        request = bench.submit(PROMPT, 1)
        bench.run()
        assert request.state is RequestState.FINISHED
        assert kv.published[request.request_id] == len(PROMPT)
        assert kv.get_num_free_blocks() == 20 - 7  # still read by the worker
        script.finished = lambda *_: ([request.request_id], [])
        bench.manager.end_step()
        assert kv.get_num_free_blocks() == 20


@pytest.mark.parametrize(("at_least", "hoped"), [(0.05, 1.0), (60.0, 60.0)])
def test_blocks_of_a_late_save_are_hoped_for_as_long_as_a_save_may_take_or_longer(
    script: Script, monkeypatch: pytest.MonkeyPatch, at_least: float, hoped: float
) -> None:
    monkeypatch.setattr("kvconnect.connector.runtime.ledger._GRACE_S", at_least)
    script.keep = lambda _: True
    script.finished = never
    with engine(load_timeout_s=0.01, save_timeout_s=1.0) as bench:
        script.worker.wakes = True
        started = time.monotonic()
        bench.submit(PROMPT, 1)
        bench.run()
        assert bench.kv.get_num_free_blocks() < len(bench.kv.pool)
        waits_s = bench.manager.wait_seconds()
        since_s = time.monotonic() - started - 1.0  # the save timed out, or less
        assert hoped - since_s <= waits_s <= hoped
        assert bench.manager.expects_news()


def saves_that_time_out(bench: BenchEngine, count: int) -> list[LlmRequest]:
    """So many requests of seven blocks, one after the other."""
    requests = []
    for _ in range(count):
        requests.append(bench.submit(PROMPT, 1))
        bench.run()
        while bench.manager.has_pending():
            bench.manager.end_step()
    return requests


def test_no_clock_hands_on_the_blocks_of_a_save_that_is_never_returned(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvconnect.connector.runtime.ledger._GRACE_S", 0.0)
    script.keep, script.finished = (lambda _: True), never
    kv = PlainKv(20)
    with engine(kv, save_timeout_s=0.02) as bench:
        (request,) = saves_that_time_out(bench, 1)
        days_later = time.monotonic() + 1e6
        monkeypatch.setattr("kvconnect.connector.runtime.ledger.time.monotonic", lambda: days_later)
        for _ in range(3):
            bench.manager.end_step()
        assert kv.get_num_free_blocks() == 20 - 7
        assert bench.manager.wait_seconds() is None  # no request has to wait for them
        script.finished = lambda *_: ([request.request_id], [])
        bench.manager.end_step()
        assert kv.get_num_free_blocks() == 20


def test_saves_that_are_never_returned_get_half_of_the_pool_at_most(script: Script) -> None:
    script.keep, script.finished = (lambda _: True), never
    kv = PlainKv(30)
    with engine(kv, save_timeout_s=0.02) as bench:
        first, second, third, *_ = saves_that_time_out(bench, 6)
        assert kv.get_num_free_blocks() == 30 - 2 * 7
        ended = [request_id for request_id, *_ in script.named("request_finished")]
        assert ended == [first.request_id, second.request_id]
        assert len(script.named("request_aborted")) == 4
        assert tokens(third) == ANSWER[:1]
        script.finished = lambda *_: ([first.request_id, second.request_id], [])
        bench.manager.end_step()
        assert kv.get_num_free_blocks() == 30
        script.finished = lambda saving, _: (saving, [])
        (last,) = saves_that_time_out(bench, 1)
        assert script.named("request_finished")[-1][0] == last.request_id


def test_saves_that_begin_together_count_together_once_one_was_late(script: Script) -> None:
    script.keep, script.finished = (lambda _: True), never
    kv = PlainKv(40)
    with engine(kv, save_timeout_s=0.02) as bench:
        saves_that_time_out(bench, 1)
        requests = [bench.submit(PROMPT, 1) for _ in range(4)]
        bench.run()
        while bench.manager.has_pending():
            bench.manager.end_step()
        assert all(tokens(request) == ANSWER[:1] for request in requests)
        assert kv.get_num_free_blocks() >= 40 - 20


def test_a_failed_save_loses_nothing_but_the_entry(script: Script) -> None:
    script.keep = lambda _: True
    script.finished = never
    with engine() as bench:
        request = bench.submit(PROMPT, 1)
        bench.step()
        script.failures = [TransferFailure(request.request_id, Direction.SAVE, reason="disk full")]
        bench.run()
        assert request.state is RequestState.FINISHED
        assert bench.kv.get_num_free_blocks() == len(bench.kv.pool)


# ---------------------------------------------------------------------- cancelling


def test_aborting_a_loading_request_cancels_and_holds_its_blocks(script: Script) -> None:
    script.match = lambda *_: (5 * T, True)
    script.finished = never
    kv = PlainKv(20)
    with engine(kv) as bench:
        request = bench.submit(PROMPT)
        bench.step()
        bench.abort(request)
        assert request.state is RequestState.FINISHED
        names = script.names()
        assert names.index("request_aborted") < names.index("cancel") < len(names)
        assert names.index("cancel") < names.index("request_finished")
        assert kv.get_num_free_blocks() == 20 - 7
        assert not bench.manager.has_pending()
        script.finished = lambda *_: ([], [request.request_id])
        bench.manager.end_step()
        assert kv.get_num_free_blocks() == 20


def test_aborting_a_queued_request_never_speaks_of_blocks(script: Script) -> None:
    with engine() as bench:
        request = bench.submit(PROMPT)
        bench.abort(request)
    assert "request_finished" not in script.names()
    assert script.named("request_aborted") == [(request.request_id,)]


def test_a_transfer_ends_in_one_state_only() -> None:
    transfers = Transfers(Direction.LOAD)
    transfer = transfers.start(1, None)
    transfers.finish(transfer, TransferState.FAILED)
    with pytest.raises(AssertionError):
        transfer.finish(TransferState.COMPLETED)


# ---------------------------------------------------------------------- waiting


def test_a_worker_that_does_not_wake_is_polled_with_back_off(script: Script) -> None:
    script.match = lambda *_: (5 * T, True)
    script.finished = never
    with engine() as bench:
        bench.submit(PROMPT)
        bench.step()
        waits = []
        for _ in range(6):
            waits.append(bench.manager.wait_seconds())
            bench.manager.end_step()
        assert waits == pytest.approx([0.002, 0.004, 0.008, 0.010, 0.010, 0.010])


def test_a_waking_worker_is_waited_for_until_the_next_deadline(script: Script) -> None:
    script.match = lambda *_: (5 * T, True)
    script.finished = never
    with engine(load_timeout_s=7.0) as bench:
        script.worker.wakes = True
        bench.submit(PROMPT)
        bench.step()
        assert bench.manager.wait_seconds() == pytest.approx(7.0, abs=0.5)


def test_an_id_that_was_not_passed_in_yet_is_not_slept_on(script: Script) -> None:
    script.keep = lambda _: True
    with engine() as bench:
        script.worker.wakes = True
        request = bench.submit(PROMPT, 2)
        bench.step()
        bench.abort(request)
        assert bench.manager.wait_seconds() == 0.0


def test_nobody_waits_for_ever_for_blocks_that_are_held_back(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvconnect.connector.runtime.ledger._GRACE_S", 0.2)
    script.match = lambda *_: (5 * T, True)
    script.finished = never
    with engine(**LATE) as bench:
        request = bench.submit(PROMPT)
        bench.step()
        bench.abort(request)
        assert bench.manager.wait_seconds() is not None
        while bench.manager.wait_seconds() is not None:
            time.sleep(0.005)


# ---------------------------------------------------------------------- the end


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_many_requests_leave_nothing_behind(script: Script, count: int) -> None:
    with engine() as bench:
        manager = bench.manager
        for number in range(count):
            script.match = lambda *_, n=number: (T, True) if n % 3 == 0 else (0, False)
            script.keep = lambda *_, n=number: n % 2 == 0
            bench.submit([1, 2, 3, 4, 5])
            bench.run()
            script.calls.clear()
            bench.outcomes.clear()
            bench.requests.clear()
        ledger = manager._ledger
        assert not manager._records
        assert (len(ledger.loads), len(ledger.saves), len(ledger.quarantine)) == (0, 0, 0)
        assert bench.kv.get_num_free_blocks() == len(bench.kv.pool)
