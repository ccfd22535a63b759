"""A store that does not answer costs one request the lookup budget, once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import pytest
from bench_engine import LAYOUT, BenchEngine, T, llm_args, reference
from stores import DictStore

from kvconnect import frame
from kvconnect.connector.io.budget import LookupBudget
from kvconnect.connector.io.io_loop import IoLoop
from kvconnect.trace import metrics

PROMPT = list(range(1, 6 * T + 3))
BUDGET_S = 0.5
BUDGET = {"lookup_timeout_ms": 1000 * BUDGET_S}
SLOT = frame.frame_nbytes(LAYOUT.block_nbytes)


@pytest.fixture
def store():
    store = DictStore()
    with BenchEngine(llm_args(store)) as bench:
        bench.answer(PROMPT, 3)
    yield store
    store.open_doors()


@contextmanager
def told_of(name: str) -> Iterator[threading.Event]:
    """An event that is set when `name` happens."""
    happened = threading.Event()
    remove = metrics.add_hook(lambda event: happened.set() if event.name == name else None)
    try:
        yield happened
    finally:
        remove()


def budget(bench):
    return bench.manager._scheduler._finding.budget


def looked_up(bench, prompt, max_tokens):
    """A request whose lookup is over, however busy the machine."""
    request = bench.submit(prompt, max_tokens)
    bench.manager._scheduler._finding._prompts[request.request_id].lookup.exception(60)
    return request


def give_up_on(store, bench):
    """One request finds out that the store does not answer."""
    store.at_lookup.shut()
    started = time.monotonic()
    bench.answer([7] * 5, 1)
    assert time.monotonic() - started >= BUDGET_S
    assert budget(bench).suspended


def test_after_one_late_answer_nobody_waits(store: DictStore) -> None:
    with BenchEngine(llm_args(store, **BUDGET)) as bench:
        give_up_on(store, bench)
        started = time.monotonic()
        for token in range(10, 110):
            assert bench.answer([token] * 5, 1) == reference([token] * 5, 1)
        assert time.monotonic() - started < 90 * BUDGET_S  # not a hundred times
        store.open_doors()


def test_a_store_that_answers_nobody_is_left_alone(store: DictStore, monkeypatch) -> None:
    # Requests end sooner than their lookups could fail: without its own questions nobody learns.
    monkeypatch.setattr("kvconnect.connector.io.budget._PROBE_S", 0.1)
    monkeypatch.setattr("kvconnect.connector.io.budget._LAST_PAUSE_S", 0.05)
    config = {"lookup_timeout_ms": 50.0}
    with told_of("store.breaker.opened") as opened, BenchEngine(llm_args(store, **config)) as bench:
        store.at_lookup.shut()
        bench.answer([7] * 5, 1)
        assert budget(bench).suspended
        assert opened.wait(60)
        store.open_doors()


def test_a_budget_suspended_just_as_the_last_question_is_answered_comes_back_again() -> None:
    answered, goes_on = threading.Event(), threading.Event()
    loop = IoLoop("test-io")

    class Answering:
        async def probe(self, within_s: float) -> None:
            loop.call_soon(lambda: answered.set() or goes_on.wait(60))

    budget = LookupBudget(0.01, Answering(), loop.submit)
    budget.wait(Future())
    assert answered.wait(60)
    assert not budget.suspended
    budget.start_step()
    budget.wait(Future())
    assert budget.suspended
    with told_of("connector.patience.found") as found:
        goes_on.set()
        assert found.wait(60)
    budget.end()
    loop.close()


def test_the_budget_comes_back_without_any_request(store: DictStore) -> None:
    with BenchEngine(llm_args(store, **BUDGET)) as bench:
        give_up_on(store, bench)
        store.open_doors()
        budget(bench)._probing.result(60)
        assert not budget(bench).suspended
        request = looked_up(bench, PROMPT, 3)
        bench.run()
        assert bench.store_tokens[request.request_id] == len(PROMPT) - 1


def test_a_request_that_is_answered_in_time_brings_it_back(store: DictStore, monkeypatch) -> None:
    monkeypatch.setattr("kvconnect.connector.io.budget._FIRST_PAUSE_S", 1000.0)
    with BenchEngine(llm_args(store, **BUDGET)) as bench:
        give_up_on(store, bench)
        store.open_doors()
        bench.answer([8] * 5, 1)
        looked_up(bench, PROMPT, 3)
        assert not budget(bench).suspended
        bench.run()


def test_an_answer_that_is_too_late_does_not(store: DictStore, monkeypatch) -> None:
    monkeypatch.setattr("kvconnect.connector.io.budget._FIRST_PAUSE_S", 1000.0)
    with BenchEngine(llm_args(store, lookup_timeout_ms=20.0)) as bench:
        store.at_lookup.shut()
        request = bench.submit(PROMPT, 3)
        store.at_lookup.await_caller()
        lookup = bench.manager._scheduler._finding._prompts[request.request_id].lookup
        bench.step()
        store.open_doors()
        lookup.result(60)
        assert budget(bench).suspended
        bench.run()


def test_failures_at_once_do_not_suspend_the_budget(store: DictStore) -> None:
    store.lookup_error = ConnectionRefusedError("nobody there")
    with BenchEngine(llm_args(store, **BUDGET)) as bench:
        request = looked_up(bench, PROMPT, 3)
        bench.run()
        assert request.tokens.view[len(PROMPT) :].tolist() == reference(PROMPT, 3)
        assert not budget(bench).suspended


@pytest.mark.parametrize("answers", [True, False])
def test_blocks_are_not_kept_for_a_store_that_does_not_answer(store: DictStore, answers) -> None:
    # Three slots of staging memory: the rest of a request's blocks would stay in the pool.
    options = {"staging_bytes": 4 * SLOT, "save_on": "finish", "lookup_timeout_ms": 500.0}
    with BenchEngine(llm_args(store, save_timeout_s=5.0, **options)) as bench:
        store.at_save.shut()
        prompt = [250 - token for token in PROMPT]
        if answers:
            looked_up(bench, prompt, 1)
        else:
            store.at_lookup.shut()
            bench.submit(prompt, 1)
        for _ in range(3):
            bench.step()
        assert not bench.queue
        assert not bench.running
        assert budget(bench).suspended is not answers
        assert bool(bench.saving) is answers
        store.open_doors()
        bench.run()


def test_while_the_store_is_left_alone_nothing_is_looked_up_or_copied_for_it(
    store: DictStore,
) -> None:
    store.lookup_error = store.save_error = ConnectionRefusedError("nobody there")
    with BenchEngine(llm_args(store, **BUDGET)) as bench:
        for token in range(10, 16):
            bench.answer([token] * 9, 1)
        assert not bench.manager._scheduler._finding.store.backend.available
        asked, tried = len(store.lookups), len(store.saves)
        staging = bench.manager._worker._access.staging
        taken = []
        take = staging.take
        staging.take = lambda *args: taken.append(args) or take(*args)
        assert bench.answer(PROMPT, 3) == reference(PROMPT, 3)
        assert not taken
        assert (len(store.lookups), len(store.saves)) == (asked, tried)


def test_what_was_not_saved_while_it_was_left_alone_is_saved_afterwards(
    store: DictStore, monkeypatch
) -> None:
    other = [250 - token for token in PROMPT]
    with BenchEngine(llm_args(store, **BUDGET)) as bench:
        guard = bench.manager._scheduler._finding.store.backend
        monkeypatch.setattr(type(guard), "available", False)
        request = bench.submit(other, 3)
        bench.step()
        monkeypatch.undo()
        bench.run()
        assert request.tokens.view[len(other) :].tolist() == reference(other, 3)
    with BenchEngine(llm_args(store, **BUDGET)) as bench:  # closing the first ended its saves
        again = looked_up(bench, other, 3)
        bench.run()
        assert bench.store_tokens[again.request_id] == len(other) - 1
