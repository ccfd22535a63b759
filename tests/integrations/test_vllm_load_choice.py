"""In vLLM a prompt is computed if its load would take longer, by what vLLM's own steps took."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from load_clock import SLOW, Decisions, LoadClock, at_two_speeds
from vllm_stand_in import Open, StandIn, T, poll, told

from kvconnect.integrations.core.load_choice import LoadChoice
from kvconnect.integrations.vllm.steps import num_computed
from kvconnect.testing.faults.faulty_backend import FaultyBackend

PROMPTS = [[number + 3 * one % 89 for one in range(10 * T + 2)] for number in range(3, 9)]


@pytest.fixture
def engine(
    open_engine: Open, store: FaultyBackend, clock: LoadClock, monkeypatch: pytest.MonkeyPatch
) -> StandIn:
    """It has computed all of `PROMPTS`, which are in the store."""
    choice = LoadChoice(tokens_per_block=T, max_tokens=100, clock=clock)
    made = open_engine(choice=choice, num_blocks=100)
    load, compute = store.inner.load, made._compute
    monkeypatch.setattr(store.inner, "load", clock.times(load, lambda keys, _: len(keys) * T))

    def timed(request, number):
        clock.computes(number)
        return compute(request, number)

    made._compute = timed
    for prompt in PROMPTS:
        made.answer(prompt, 2)
        clock.now += 60.0  # nothing to do
    made.flush()
    return made


def ask(engine: StandIn, number: int) -> int:
    """Tokens of a prompt that were loaded."""
    request = engine.answer(PROMPTS[number])
    assert request.answer == told(engine, PROMPTS[number])
    return request.cached


@at_two_speeds
def test_a_store_is_asked_while_it_is_faster(engine, clock, token_s, asked, decided):
    clock.token_s = token_s
    seen = Decisions()
    assert [ask(engine, number) for number in range(4)] == [10 * T * one for one in asked]
    assert seen() == decided
    engine.check_empty()


def test_a_request_is_decided_on_once_however_often_it_is_asked_about(engine, clock):
    clock.token_s = SLOW
    ask(engine, 0)
    seen = Decisions()
    request = engine.submit(PROMPTS[1])
    assert [poll(engine, request) for _ in range(300)] == [(0, False)] * 300
    assert seen() == {"compute": 1}
    assert poll(engine, request, 8 * T) == (0, False)  # the device has more of it now
    assert seen() == {"compute": 1}
    request.wanted = request.num_tokens + 1
    engine.run()
    assert request.answer == told(engine, PROMPTS[1])


def test_a_preempted_request_is_decided_on_anew(engine, clock):
    clock.token_s = SLOW
    ask(engine, 0)
    request = engine.submit(PROMPTS[1])
    request.wanted = request.num_tokens + 3
    engine.run(until=lambda: request.answer is not None)
    seen = Decisions()
    engine.preempt(request)
    engine.run()
    assert seen() == {"compute": 1}
    engine.check_empty()


def test_tokens_and_contexts_of_a_step_are_those_that_it_computes():
    cached = SimpleNamespace(req_ids=["a", "b"], num_computed_tokens=[100, 7])
    output = SimpleNamespace(
        scheduled_cached_reqs=cached,
        scheduled_new_reqs=[SimpleNamespace(req_id="c", num_computed_tokens=16)],
        num_scheduled_tokens={"a": 1, "b": 3, "c": 20},
        total_num_scheduled_tokens=24,
    )
    assert num_computed(output) == (24, 100.5 + 3 * 8.5 + 20 * 26)
