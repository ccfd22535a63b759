"""Weights that are replaced while vLLM runs: neither loaded nor saved under the old ones' name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from vllm_stand_in import PROMPT, Model, Open, Request, StandIn, T, poll, told

from kvconnect.trace import metrics

WHOLE = 5 * T
OTHER = 37.0


def counted(engine: StandIn) -> None:
    with torch.no_grad():
        engine.model.factor.fill_(OTHER)


def uncounted(engine: StandIn) -> None:
    engine.model.factor.data.fill_(OTHER)


def other_memory(engine: StandIn) -> None:
    engine.model.factor.data = torch.full((4,), OTHER, dtype=torch.float64)


def other_parameter(engine: StandIn) -> None:
    engine.model.factor = torch.nn.Parameter(torch.full((4,), OTHER, dtype=torch.float64))


def other_model(engine: StandIn) -> None:
    engine.model = Model(OTHER)


def loaded_state(engine: StandIn) -> None:
    engine.model.load_state_dict(Model(OTHER).state_dict())


def buffer(engine: StandIn) -> None:
    engine.model.table.data.fill_(5.0)


def hook(engine: StandIn) -> None:
    engine.model.register_forward_hook(lambda *what: what[2] + 5.0)


def patched_forward(engine: StandIn) -> None:
    forward = engine.model.forward
    engine.model.forward = lambda state: forward(state) + 5.0


CHANGES = [
    pytest.param(buffer, marks=pytest.mark.planted("buffer-changed", "vllm", "refused")),
    pytest.param(hook, marks=pytest.mark.planted("hook-added", "vllm", "refused")),
    pytest.param(patched_forward, marks=pytest.mark.planted("forward-patched", "vllm", "refused")),
    pytest.param(counted, marks=pytest.mark.planted("weights-updated", "vllm", "refused")),
    pytest.param(loaded_state, marks=pytest.mark.planted("weights-updated", "vllm", "refused")),
    pytest.param(uncounted, marks=pytest.mark.planted("uncounted-write", "vllm", "refused")),
    pytest.param(other_memory, marks=pytest.mark.planted("storage-replaced", "vllm", "refused")),
    pytest.param(other_parameter, marks=pytest.mark.planted("storage-replaced", "vllm", "refused")),
    pytest.param(other_model, marks=pytest.mark.planted("storage-replaced", "vllm", "refused")),
]
FEW = [counted, uncounted, other_model]
Change = Callable[[StandIn], None]


def check(engine: StandIn, *, cached: int, prompt: list[int] = PROMPT) -> None:
    """The engine answers as its weights of now do, with so many tokens from the store."""
    answer = engine.answer(prompt)
    engine.flush()
    assert (answer.answer, answer.cached) == (told(engine, prompt), cached)


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_loaded_or_saved_from_a_change_on(open_engine: Open, shared, change):
    engine = open_engine(url=shared)
    check(engine, cached=0)
    check(engine, cached=WHOLE)
    change(engine)
    for _ in range(2):
        answer = engine.answer(PROMPT)  # the first one's load fails
        engine.flush()
        assert answer.answer == told(engine)
    assert answer.cached == 0
    longer = [*PROMPT, *range(50, 50 + 3 * T)]
    check(engine, cached=0, prompt=longer)
    engine.check_empty()
    # Nothing of the new weights has come into the store.
    check(open_engine(url=shared), cached=WHOLE)
    check(open_engine(url=shared), cached=WHOLE, prompt=longer)


def test_requests_that_are_not_cached_for_it_are_counted(open_engine: Open):
    engine = open_engine()
    check(engine, cached=0)
    counted(engine)
    engine.answer(PROMPT)
    before = metrics.snapshot().get("engine.request.uncached", 0)
    engine.answer(PROMPT)
    assert metrics.snapshot()["engine.request.uncached"] == before + 1


@pytest.mark.parametrize("change", FEW)
def test_behind_a_reset_the_new_weights_have_a_name_of_their_own(open_engine: Open, shared, change):
    engine = open_engine(url=shared)
    check(engine, cached=0)
    change(engine)
    assert engine.answer(PROMPT).answer == told(engine)
    assert engine.reset()
    check(engine, cached=0)
    check(engine, cached=WHOLE)
    check(open_engine(url=shared), cached=WHOLE)  # of the old weights
    engine.check_empty()


@pytest.mark.parametrize("change", FEW)
@pytest.mark.parametrize("is_first", [True, False])
def test_weights_that_change_between_a_reset_and_the_next_step_have_one(
    open_engine: Open, shared, change, is_first
):
    """As with ``pause_generation(clear_cache=True)``, new weights and ``resume``."""
    engine = open_engine(url=shared)
    check(engine, cached=0)
    if is_first:
        assert engine.reset()
        change(engine)
    else:
        change(engine)
        assert engine.reset()
    answer = engine.answer(PROMPT)  # the first one may be looked up in vain
    engine.flush()
    assert answer.answer == told(engine)
    engine.answer(PROMPT)
    engine.flush()
    check(engine, cached=WHOLE)
    check(open_engine(url=shared), cached=WHOLE)
    engine.check_empty()


def test_weights_that_the_engine_says_it_changed_are_named_before_the_next_step(
    open_engine: Open, shared
):
    engine = open_engine(url=shared)
    check(engine, cached=0)
    engine.reset()
    for value in (OTHER, 41.0):
        engine.scheduler.weights_changed("update_weights() was called")
        engine.model.factor.data.fill_(value)
    check(engine, cached=0)
    check(engine, cached=WHOLE)
    engine.scheduler.weights_changed("update_weights() was called")
    check(engine, cached=0)
    check(engine, cached=0)
    engine.reset()
    check(engine, cached=0)
    check(engine, cached=WHOLE)
    check(open_engine(url=shared), cached=WHOLE)


@pytest.mark.planted("paused", "vllm", "hit")
def test_a_reset_without_new_weights_keeps_the_store(open_engine: Open):
    engine = open_engine()
    check(engine, cached=0)
    for _ in range(3):
        assert engine.reset()
        check(engine, cached=WHOLE)
    running = engine.submit(PROMPT, wanted=len(PROMPT) + 9)
    engine.run(lambda: running.num_tokens > len(PROMPT) + 2)
    assert engine.reset()
    engine.run()
    engine.check_empty()


def test_no_name_while_the_device_holds_blocks_of_the_old_weights(open_engine: Open):
    engine = open_engine()
    check(engine, cached=0)
    counted(engine)
    engine.answer(PROMPT)
    assert not engine.scheduler.reset_cache(device_is_empty=False)
    check(engine, cached=0)
    check(engine, cached=0)
    assert engine.reset()
    check(engine, cached=0)
    check(engine, cached=WHOLE)


def test_what_runs_through_a_change_is_not_saved(open_engine: Open, shared):
    engine = open_engine(url=shared)
    running = engine.submit(PROMPT, wanted=len(PROMPT) + 4 * T)
    engine.run(lambda: running.num_tokens > len(PROMPT) + T)
    counted(engine)
    engine.run(lambda: running.num_tokens > len(PROMPT) + 3 * T)
    engine.reset()
    engine.run()
    engine.flush()
    engine.check_empty()
    fresh = open_engine(url=shared)
    again = fresh.answer(running.all_token_ids[:-1])
    before = 1.0
    for token in running.all_token_ids[:-1]:
        before = fresh.model.next(before, token)
    assert again.answer == before
    assert again.cached >= WHOLE


@pytest.mark.parametrize("save_on", ["full", "finish"])
def test_of_a_step_in_which_weights_change_nothing_is_saved(
    open_engine: Open, shared, monkeypatch, save_on
):
    engine = open_engine(url=shared, save_on=save_on)
    compute = engine._compute

    def compute_and_change(*what):
        counted(engine)
        return compute(*what)

    with monkeypatch.context() as patched:
        patched.setattr(engine, "_compute", compute_and_change)
        engine.answer(PROMPT)
    engine.flush()
    engine.check_empty()
    check(open_engine(url=shared), cached=0)


@pytest.mark.parametrize("fault", ["late", "hang"])
def test_a_load_that_is_under_way_fails(open_engine: Open, store, fault):
    engine = open_engine()
    check(engine, cached=0)
    store.delay_s = 0.1
    store._operations = frozenset({"load"})
    store.set(fault)
    request = engine.submit(PROMPT, wanted=len(PROMPT) + 1)
    engine.run(lambda: request.state == "loading")
    counted(engine)
    assert not engine.reset() or not engine.scheduler._weights.is_stopped
    engine.run()
    assert request.answer == told(engine)
    engine.check_empty()


@pytest.mark.parametrize("preempted", [False, True])
def test_what_was_held_until_the_end_is_not_saved_behind_a_change(
    open_engine: Open, shared, preempted
):
    engine = open_engine(url=shared, save_on="finish")
    running = engine.submit(PROMPT, wanted=len(PROMPT) + 2 * T)
    engine.run(lambda: running.num_tokens > len(PROMPT) + T)
    counted(engine)
    if preempted:
        engine.preempt(running)
    engine.run()
    engine.flush()
    engine.check_empty()
    check(open_engine(url=shared), cached=0)


def running_with_held_blocks(engine: StandIn) -> Request:
    """Of a prompt that is looked up once only: again, and the preemption would be noticed then."""
    request = engine.submit(PROMPT, wanted=len(PROMPT) + 2 * T)
    assert poll(engine, request) == (0, False)
    request.skip_reading_prefix_cache = True
    engine.run(lambda: request.num_tokens > len(PROMPT) + T)
    engine.reset()
    return request


def test_what_is_held_is_not_saved_once_the_device_has_forgotten_it(open_engine: Open, shared):
    """By sleep(level=1): the workers learn of it in the step after the device woke up."""
    engine = open_engine(url=shared, save_on="finish")
    running_with_held_blocks(engine)
    engine.scheduler.cache_discarded()
    engine.run()
    engine.flush()
    engine.check_empty()
    check(open_engine(url=shared), cached=0)


def test_of_what_ends_after_a_reset_nothing_is_held(open_engine: Open):
    engine = open_engine(save_on="finish")
    request = running_with_held_blocks(engine)
    assert len(engine.worker._worker._held) == 1
    engine.abort(request)
    engine.run()
    assert len(engine.worker._worker._held) == 0
    engine.check_empty()


def test_weights_that_change_twice_before_they_have_a_name_have_none(
    open_engine: Open, store, monkeypatch
):
    """The device may hold blocks of the first by then."""
    engine = open_engine()
    check(engine, cached=0)
    counted(engine)
    engine.reset()
    store.delay_s = 0.1
    store._operations = frozenset({"load"})
    store.set("late")
    monkeypatch.setattr(engine.worker._worker, "cancel", lambda _: None)
    request = engine.submit(PROMPT, wanted=len(PROMPT) + 1)
    assert poll(engine, request) == (WHOLE, True)
    engine.step()
    assert engine.scheduler._weights.begins_later
    engine.model.factor.data.fill_(41.0)
    engine.run()
    assert request.answer == told(engine)
    store.heal()
    for _ in range(3):
        check(engine, cached=0)
    assert engine.reset()
    check(engine, cached=0)
    check(engine, cached=WHOLE)
