"""Whether to load or to compute, by measured steps and loads."""

from __future__ import annotations

import pytest

from kvconnect import trace as trace_module
from kvconnect.integrations.core.load_choice import LoadChoice
from kvconnect.trace import Metrics

T = 16
STEP_S, TOKEN_S = 0.01, 0.001
"""What a model takes for a step, and for each of its tokens."""
FAST, SLOW = TOKEN_S / 8, TOKEN_S * 8
"""Seconds of a store for a token."""


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> Metrics:
    fresh = Metrics()
    monkeypatch.setattr(trace_module, "metrics", fresh)
    return fresh


class Engine:
    """An engine with a clock of its own."""

    def __init__(self, **more: object) -> None:
        self.now = 100.0
        settings = {"tokens_per_block": T, "max_tokens": 512} | more
        self.choice = LoadChoice(**settings, clock=lambda: self.now)

    def step(self, tokens: int, start: int = 0) -> None:
        self.choice.begin_step(tokens, tokens * (start + tokens / 2))
        self.now += STEP_S + tokens * TOKEN_S
        self.choice.end_step()

    def compute(self, tokens: int) -> None:
        for start in range(0, tokens, 512):
            self.step(min(512, tokens - start), start)

    def prompt(self, tokens: int, token_s: float, *, loaded: float = 1.0) -> bool:
        """A prompt whose store takes `token_s` for a token; returns whether it was loaded."""
        load = self.choice.choose(0, tokens - tokens % T, tokens)
        if load is None:
            self.compute(tokens)
            return False
        self.choice.start(load)
        self.now += load.num_tokens * token_s
        self.choice.end(load, int(load.num_tokens * loaded))
        self.step(1, tokens)
        return True


@pytest.fixture
def engine(metrics: Metrics) -> Engine:
    """Its steps are measured."""
    made = Engine()
    for tokens in (500, 1, 200, 1, 30):
        made.compute(tokens)
    return made


def decisions(metrics: Metrics) -> dict[str, float]:
    return {
        dict(labels)["decision"]: counters["engine.load"]
        for labels, counters in metrics.by_labels().items()
        if "engine.load" in counters
    }


def test_while_the_store_is_unmeasured_prompts_are_loaded(engine, metrics):
    assert engine.prompt(1000, SLOW)
    assert decisions(metrics) == {"load": 1}


def test_while_the_model_is_unmeasured_prompts_are_loaded():
    engine = Engine()
    assert engine.prompt(1000, SLOW)
    assert engine.prompt(1000, SLOW)  # its steps were of one token
    engine.step(1)
    assert engine.prompt(1000, SLOW)


@pytest.mark.parametrize(("token_s", "loads"), [(FAST, True), (SLOW, False)])
def test_the_faster_of_the_two_is_chosen(engine, metrics, token_s, loads):
    assert engine.prompt(1000, token_s)
    assert [engine.prompt(tokens, token_s) for tokens in (1000, 300, 2000)] == [loads] * 3
    assert decisions(metrics) == ({"load": 4} if loads else {"load": 1, "compute": 3})


def test_what_is_on_the_device_is_neither_loaded_nor_computed(engine):
    first = engine.choice.choose(0, 960, 970)
    engine.choice.start(first)
    engine.now += 0.5 + 960 * FAST  # half a second to the first byte
    engine.choice.end(first, 960)
    for amount in (16, 320):  # now both are measured
        load = engine.choice.part(amount)
        engine.choice.start(load)
        engine.now += 0.5 + amount * FAST
        engine.choice.end(load, amount)
    assert engine.choice.choose(0, 960, 970) is not None
    assert engine.choice.choose(640, 960, 970) is None  # 330 tokens are computed in that time


def test_one_in_a_hundred_rejected_loads_is_done_all_the_same(engine, metrics):
    engine.prompt(1000, SLOW)
    assert [engine.prompt(1000, SLOW) for _ in range(200)].count(True) == 2
    assert decisions(metrics) == {"load": 3, "compute": 198}


def test_once_the_store_is_fast_again_all_prompts_are_loaded(engine):
    engine.prompt(1000, SLOW)
    assert [engine.prompt(1000, SLOW) for _ in range(3)] == [False] * 3
    results = [engine.prompt(1000, FAST) for _ in range(110)]
    first = results.index(True)
    assert first <= 100
    assert all(results[first:])


def test_an_explored_load_that_was_slow_or_failed_changes_nothing(engine):
    engine.prompt(1000, SLOW)
    for _ in range(99):
        engine.prompt(1000, SLOW)
    assert engine.prompt(1000, SLOW)
    assert not engine.prompt(1000, SLOW)
    for _ in range(98):
        engine.prompt(1000, SLOW)
    assert engine.prompt(1000, FAST, loaded=0.0)  # nothing of it came
    assert not engine.prompt(1000, SLOW)


def test_a_store_that_became_slow_is_noticed_after_three_loads(engine):
    assert all(engine.prompt(1000, FAST) for _ in range(50))
    assert [engine.prompt(1000, SLOW) for _ in range(8)] == [True] * 3 + [False] * 5


def test_one_slow_load_among_others_changes_nothing(engine):
    for number in range(60):
        assert engine.prompt(1000, SLOW if number % 10 in (7, 8) else FAST)


def test_a_store_that_brings_nothing_is_found_to_be_slow(engine):
    engine.prompt(1000, FAST)
    for _ in range(4):
        if not engine.prompt(1000, 0.03, loaded=0.0):
            break
    assert not engine.prompt(1000, FAST)


def test_without_decisions_all_is_loaded_and_counted(metrics):
    engine = Engine(decides=False)
    engine.compute(500)
    engine.compute(300)
    assert all(engine.prompt(1000, SLOW) for _ in range(5))
    assert decisions(metrics) == {"load": 5}


def test_predicted_and_real_seconds_are_counted(engine, metrics):
    engine.prompt(960, FAST)
    engine.prompt(960, FAST)
    found = metrics.snapshot()
    assert found["engine.load.predicted"] == 1  # the first one had no prediction
    assert found["engine.load.predicted.seconds"] == pytest.approx(960 * FAST, rel=0.1)
    assert found["engine.load.predicted.took"] == pytest.approx(960 * FAST)


def test_rows_that_load_together_compute_together(engine):
    engine.prompt(960, TOKEN_S / 2)
    assert engine.choice.choose(0, 960, 970, num_rows=4) is not None
    other = Engine()
    other.compute(500)
    other.compute(300)
    other.prompt(960, TOKEN_S * 2)
    assert other.choice.choose(0, 960, 970, num_rows=4) is None


def test_a_part_of_an_explored_load_is_judged_by_its_share(engine):
    engine.prompt(1000, SLOW)
    explored = None
    while explored is None:
        explored = engine.choice.choose(0, 992, 1000)
    part = engine.choice.part(496, explored)
    engine.choice.start(part)
    engine.now += 496 * FAST
    engine.choice.end(part, 496)
    assert engine.choice.choose(0, 992, 1000) is not None


# ---------------------------------------------------------------------- steps


def seconds_of(choice: LoadChoice, tokens: int) -> float:
    return choice._steps.predict(tokens, tokens / 2)


def test_time_without_work_is_in_no_step():
    engine = Engine()
    for tokens in (100, 400, 10, 100, 400, 10):
        engine.step(tokens)
        engine.now += 60.0
    assert seconds_of(engine.choice, 400) == pytest.approx(STEP_S + 400 * TOKEN_S, rel=0.05)


def test_steps_that_overlap_count_from_the_end_of_the_one_before():
    engine = Engine(num_ahead=1)
    work, before = (100, 400, 10, 200, 1, 300, 100, 400, 10), 0
    for _ in range(2):
        for tokens in work:
            engine.choice.begin_step(tokens, tokens * tokens / 2)
            if engine.choice.num_running == 2:
                engine.now += STEP_S + before * TOKEN_S
                engine.choice.end_step()
            before = tokens
        engine.now += STEP_S + before * TOKEN_S
        engine.choice.end_step()
        engine.now += 60.0
    assert engine.choice.num_running == 0
    for tokens in (10, 400):
        assert seconds_of(engine.choice, tokens) == pytest.approx(
            STEP_S + tokens * TOKEN_S, rel=0.05
        )


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_a_step_whose_end_was_not_reported_is_no_other_ones(num_ahead):
    engine = Engine(num_ahead=num_ahead)
    for _ in range(3):
        engine.choice.begin_step(7, 0.0)
        engine.now += 60.0
    for _ in range(num_ahead):
        engine.choice.end_step()
    assert engine.choice.num_running == 1
    engine.choice.end_step()
    engine.choice.end_step()  # of nothing
    for tokens in (100, 400, 10, 100, 400, 10):
        engine.step(tokens)
    assert seconds_of(engine.choice, 400) == pytest.approx(STEP_S + 400 * TOKEN_S, rel=0.05)
