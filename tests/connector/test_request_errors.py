"""What a connector raises for one request is kept for that request, and nothing else suffers."""

from __future__ import annotations

import pytest
import recording
from bench_engine import BenchEngine, T, llm_args
from recording import Script

from kvconnect.connector.data import Direction, TransferFailure
from kvconnect.request import LlmRequest, RequestState, ScheduledBatch

PROMPT = list(range(1, 4 * T + 2))


class Planted(RuntimeError):
    pass


def raise_in(owner: object, method: str) -> None:
    def planted(*_: object) -> None:
        raise Planted(method)

    assert hasattr(owner, method)
    setattr(owner, method, planted)


def loading(script: Script, bench: BenchEngine) -> LlmRequest:
    """A request whose load in the background has begun, and does not end."""
    script.match = lambda *_: (2 * T, True)
    script.finished = lambda *_: ([], [])
    request = bench.submit(PROMPT, max_tokens=3)
    bench.step()
    assert request.state is RequestState.LOADING
    return request


def test_blocks_are_held_for_a_load_whose_cancel_raises(script: Script) -> None:
    with BenchEngine(llm_args(recording.config())) as bench:
        free = bench.kv.get_num_free_blocks()
        request = loading(script, bench)
        raise_in(script.worker, "cancel")
        bench.abort(request)
        errors = bench.manager.take_errors()
        assert [str(errors[one]) for one in errors] == ["cancel"]
        # The load may still write into them.
        assert bench.kv.get_num_free_blocks() < free
        script.finished = lambda *_: ([], [request.request_id])
        bench.manager.end_step()
        assert bench.kv.get_num_free_blocks() == free


def test_a_load_that_failed_is_settled_although_the_scheduler_raises(script: Script) -> None:
    with BenchEngine(llm_args(recording.config())) as bench:
        request = loading(script, bench)
        raise_in(script.scheduler, "load_failed")
        script.failures = [TransferFailure(request.request_id, Direction.LOAD, T, "planted")]
        with pytest.raises(Planted, match="load_failed"):
            bench.step()
        assert bench.outcomes[-1].failed == {request.request_id: T}
        assert not bench.manager.has_pending()


def test_a_load_that_never_started_does_not_count_as_loading(script: Script) -> None:
    with BenchEngine(llm_args(recording.config())) as bench:
        script.match = lambda *_: (2 * T, True)
        request = bench.submit(PROMPT, max_tokens=3)
        raise_in(script.scheduler, "update_state_after_alloc")
        bench.kv.prepare_resources(ScheduledBatch([request]))
        assert bench.manager._loads._num_loading() > 0
        bench.manager.request_finished(request, aborted=True)
        assert list(bench.manager.take_errors()) == [request.request_id]
        assert bench.manager._loads._num_loading() == 0


@pytest.mark.parametrize("owner", ["scheduler", "worker"])
def test_a_reset_that_raises_is_a_reset(script: Script, owner: str) -> None:
    with BenchEngine(llm_args(recording.config())) as bench:
        request = bench.submit(PROMPT, max_tokens=3)
        bench.step()
        raise_in(getattr(script, owner), "request_reset")
        bench.preempt(request)
        errors = bench.manager.take_errors()
        assert list(errors) == [request.request_id]
        assert bench.manager.take_errors() == {}
        bench.run()
        assert request.state is RequestState.FINISHED


def test_the_first_error_of_a_request_is_its_error(script: Script) -> None:
    with BenchEngine(llm_args(recording.config())) as bench:
        raise_in(script.scheduler, "on_new_request")
        raise_in(script.scheduler, "request_aborted")
        request = bench.submit(PROMPT)
        bench.manager.request_finished(request, aborted=True)
        errors = bench.manager.take_errors()
        assert [str(errors[one]) for one in errors] == ["on_new_request"]
        bench.queue.clear()


def test_nothing_is_loaded_for_a_request_that_has_an_error(script: Script) -> None:
    with BenchEngine(llm_args(recording.config())) as bench:
        raise_in(script.scheduler, "on_new_request")
        bench.submit(PROMPT)
        script.match = lambda *_: (2 * T, True)
        with pytest.raises(Planted, match="on_new_request"):
            bench.step()
    assert not script.named("get_num_new_matched_tokens")
    assert not script.named("update_state_after_alloc")
    assert not script.outputs
