"""What a connector answers is checked, and the error names its class."""

from __future__ import annotations

import threading

import pytest
import recording
from bench_engine import BenchEngine, PlainKv, T, llm_args, reference
from recording import Script

from kvconnect.connector.data import Direction, TransferFailure
from kvconnect.errors import ConnectorContractError, UsageError
from kvconnect.request import RequestState

PROMPT = list(range(1, 4 * T + 2))


def engine(**settings) -> BenchEngine:
    return BenchEngine(llm_args(recording.config(**settings)))


SENTENCES = {
    "match": r"Recorder\.get_num_new_matched_tokens",
    "finished": r"RecordingWorker\.get_finished",
    "keep": r"Recorder\.request_finished",
    "failures": r"RecordingWorker\.get_failed.*a list of TransferFailure",
}
ANSWERS = {
    "match": [None, 3, (3,), (3, False, 1), ("3", False), (3.0, False), (True, False), (3, 0),
              (-1, False), (0, True)],
    "finished": [None, ([], [], []), ([1],), (["x"], []), ([], [True])],
    "keep": [None],
    "failures": [[(1, "load")]],
}  # fmt: skip


@pytest.mark.parametrize(
    ("method", "answer"), [(method, one) for method in ANSWERS for one in ANSWERS[method]]
)
def test_an_answer_that_is_none_names_the_class(
    script: Script, method: str, answer: object
) -> None:
    setattr(script, method, answer if method == "failures" else lambda *_: answer)
    with engine() as bench:
        bench.submit(PROMPT)
        with pytest.raises(ConnectorContractError, match=SENTENCES[method]):
            bench.step()


def test_a_match_is_cut_at_the_last_prompt_token(script: Script) -> None:
    script.match = lambda *_: (1000, True)
    with engine() as bench:
        request = bench.submit(PROMPT)
        bench.step()
        assert bench.outcomes[0].loaded == {request.request_id: len(PROMPT) - 1}


def test_after_a_preemption_generated_tokens_count_as_prompt(script: Script) -> None:
    with engine() as bench:
        request = bench.submit(PROMPT, max_tokens=5)
        bench.step()
        bench.step()
        script.match = lambda *_: (1000, True)
        bench.preempt(request)
        bench.step()
        assert bench.outcomes[-1].loaded == {request.request_id: len(PROMPT) + 1}


def test_a_one_token_prompt_takes_nothing(script: Script) -> None:
    script.match = lambda *_: (5, True)
    with engine() as bench:
        assert bench.answer([7]) == reference([7])
    assert not script.outputs[0].loading_requests


@pytest.mark.parametrize(
    ("device", "asked_at", "offer", "taken"),
    [
        (0, 0, 4, 4),
        (4, 4, 4, 8),
        (6, 4, 4, 8),  # an unaligned device match never hides an external hit
        (6, 4, 2, None),  # reaches no further than the partial match
        (6, 4, 3, 7),
    ],
)
def test_the_question_is_asked_at_a_block_boundary(
    script: Script, device: int, asked_at: int, offer: int, taken: int | None
) -> None:
    script.match = lambda *_: (offer, True)
    kv = PlainKv()
    kv.device_match = lambda _: device
    with BenchEngine(llm_args(recording.config()), kv=kv) as bench:
        request = bench.submit(PROMPT)
        bench.step()
        assert script.named("get_num_new_matched_tokens") == [(request.request_id, asked_at)]
        if taken is None:
            assert script.outputs[0].new_requests[0].computed_position == device
        else:
            assert bench.outcomes[0].loaded == {request.request_id: taken}


def test_an_id_returned_again_after_its_success_is_an_error(script: Script) -> None:
    script.match = lambda *_: (8, True)
    with engine() as bench:
        request = bench.submit(PROMPT, max_tokens=3)
        bench.step()
        script.finished = lambda *_: ([], [request.request_id])
        with pytest.raises(ConnectorContractError, match="returned before"):
            bench.step()


def test_a_synchronous_load_is_not_to_be_returned(script: Script) -> None:
    script.match = lambda *_: (8, False)
    with engine() as bench:
        request = bench.submit(PROMPT)
        script.finished = lambda *_: ([], [request.request_id])
        with pytest.raises(ConnectorContractError, match="never passed in"):
            bench.step()


@pytest.mark.parametrize(
    "broken",
    [
        {"num_valid_tokens": 10**9},
        {"num_valid_tokens": 9},  # the load ends at 8
        {"num_valid_tokens": -1},
        {"num_valid_tokens": 1.0},
        {"num_valid_tokens": True},
        {"request_id": "1"},
        {"direction": "load"},
        {"writes_ended": None},
        {"reason": 7},
    ],
)
@pytest.mark.parametrize("is_async", [True, False])
def test_a_failure_must_make_sense(script: Script, broken: dict, is_async: bool) -> None:
    script.match, script.finished = (lambda *_: (8, is_async)), (lambda *_: ([], []))
    with engine() as bench:
        request = bench.submit(PROMPT)
        told = {"request_id": request.request_id, "direction": Direction.LOAD} | broken
        script.failures = [TransferFailure(**told)]
        with pytest.raises(ConnectorContractError, match=rf"get_failed.*{next(iter(broken))}"):
            bench.step()


def test_each_id_is_passed_in_once(script: Script) -> None:
    script.match = lambda *_: (8, True)
    script.keep = lambda _: True
    with engine() as bench:
        request = bench.submit(PROMPT, max_tokens=3)
        bench.run()
        assert request.state is RequestState.FINISHED
        passed = script.named("get_finished")
    assert [one for one, _ in passed if one] == [[request.request_id]]
    assert [one for _, one in passed if one] == [[request.request_id]]


@pytest.mark.parametrize("told", ["metadata", "worker meta"])
def test_what_cannot_be_pickled_does_not_pass_in_tests_with_one_rank(
    script: Script, told: str
) -> None:
    with engine() as bench:
        bench.submit(PROMPT)
        if told == "metadata":
            script.meta = lambda _: threading.Lock()
        else:
            script.worker.build_worker_meta = threading.Lock  # type: ignore[method-assign,union-attr]
        with pytest.raises(TypeError, match="pickle"):
            bench.step()


def test_an_unknown_request_is_the_callers_bug(script: Script) -> None:
    with engine() as bench:
        request = bench.submit(PROMPT)
    with engine() as other, pytest.raises(UsageError, match="on_new_request was not called"):
        other.manager.match_external(request, 0)
