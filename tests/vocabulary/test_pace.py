"""The pace of steps and loads: measured, predicted, and not misled by single measurements."""

from __future__ import annotations

from math import inf, isfinite, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.pace import LoadPace, RunningLoad, StepPace

A, B, C = 0.004, 1 / 8000, 4e-9
SECONDS = st.floats(1e-9, 1e6)
STEPS = st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 10**6), SECONDS), max_size=40)


def step_s(tokens, context):
    return A + B * tokens + C * tokens * context


def record(pace, tokens, context, factor=1.0):
    pace.record(tokens, tokens * context, factor * step_s(tokens, context))


def measured(*, first=()) -> StepPace:
    pace = StepPace()
    for step in first:
        pace.record(*step)
    for tokens in (1, 16, 300, 2048):
        for context in (0, 1000, 20_000):
            record(pace, tokens, context)
    return pace


def a_load(pace, *news, end=None) -> RunningLoad:
    """A load of 1000 with `news`; it has ended if there is an `end`."""
    load = RunningLoad(pace, 1000)
    for amount, seconds in news:
        load.progress(amount, seconds)
    if end is not None:
        load.end(end)
    return load


def steady(first_byte_s=0.05, rate=1000.0, piece=100) -> LoadPace:
    """The pace of a store that was measured by one load of 1000."""
    pace = LoadPace()
    amounts = range(piece, 1001, piece)
    a_load(pace, *((n, first_byte_s + n / rate) for n in amounts), end=first_byte_s + 1000 / rate)
    return pace


# ---------------------------------------------------------------- steps


def test_the_seconds_of_a_step_are_found():
    pace = measured()
    assert pace.coefficients == pytest.approx((A, B, C), rel=2e-3)
    for tokens, context in ((1, 0), (700, 9000), (4096, 60_000)):
        assert pace.predict(tokens, context) == pytest.approx(step_s(tokens, context), rel=1e-3)


def test_last_tokens_of_loaded_prompts_do_not_make_computing_look_slow():
    pace = StepPace()
    for tokens, context, seconds in ((1, 1023, 0.0053), (1, 1023, 0.0038), (32, 16, 0.0064)):
        pace.record(tokens, tokens * context, seconds)
    assert pace.seconds_for_prompt(0, 1024, 2048) == pytest.approx(0.07, rel=0.2)


def test_a_model_is_measured_from_its_second_step_on():
    pace = StepPace()
    assert pace.predict(16, 0) is pace.seconds_for_prompt(0, 16, 16) is None
    record(pace, 16, 0)
    assert (pace.predict(16, 0), pace.reach, pace.coefficients) == (None, 0, ())
    record(pace, 16, 0)
    assert pace.predict(16, 0) == pytest.approx(step_s(16, 0))
    assert pace.reach == 64


@pytest.mark.parametrize("seconds", [0.0, -1.0, nan, inf])
def test_a_time_that_is_none_is_ignored(seconds):
    pace = measured()
    before = pace.coefficients
    pace.record(10**6, 0, seconds)
    pace.record(0, 0, 1.0)
    assert (pace.coefficients, pace.reach) == (before, 4 * 2048)


def test_a_slow_first_step_is_forgotten_with_the_second():
    pace = StepPace()
    pace.record(16, 0, 60.0)
    record(pace, 16, 0)
    assert pace.predict(16, 0) == pytest.approx(step_s(16, 0), rel=1e-2)


def test_a_slow_step_among_many_hardly_counts():
    pace = measured()
    record(pace, 2048, 5000, factor=50)
    assert pace.predict(2048, 5000) == pytest.approx(step_s(2048, 5000), rel=0.05)


def test_a_step_that_seems_to_take_no_time_does_not_make_the_model_fast():
    pace = measured()
    assert pace.predict(2048, 0)
    pace.record(2048, 0, 1e-9)
    assert pace.predict(2048, 0) > step_s(2048, 0) / 2


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_model_that_became_faster_or_slower_is_noticed(factor):
    pace = measured()
    for _ in range(40):
        for tokens in (1, 16, 300, 2048):
            record(pace, tokens, 1000, factor)
            assert pace.predict(tokens, 1000)
    assert pace.predict(2048, 1000) == pytest.approx(factor * step_s(2048, 1000), rel=0.1)


def test_thousands_of_generated_tokens_do_not_displace_prompts():
    pace = measured()
    for step in range(3000):
        # Generation reads the cache: its context costs ten times as much per token.
        context = 30_000 + step
        pace.record(4, 4 * context, A + 4 * B + 10 * C * 4 * context)
    assert pace.predict(2048, 1000) == pytest.approx(step_s(2048, 1000), rel=0.1)
    assert pace.predict(512, 9000) == pytest.approx(step_s(512, 9000), rel=0.15)


@given(st.integers(0, 9000), st.integers(1, 9000), st.integers(1, 4000))
def test_a_prompt_takes_the_sum_of_its_steps(start, tokens, chunk):
    pace, end, total = measured(), start + tokens, 0.0
    for first in range(start, end, chunk):
        last = min(end, first + chunk)
        total += pace.predict(last - first, (first + last) / 2)
    assert pace.seconds_for_prompt(start, end, chunk) == pytest.approx(total)


def test_no_tokens_take_no_time():
    assert measured().seconds_for_prompt(16, 16, 8) == 0.0


@given(STEPS, st.integers(1, 10**6), st.floats(0, 10**6))
def test_a_prediction_is_finite_never_negative_and_grows(steps, tokens, context):
    pace = StepPace()
    for size, mean, seconds in steps:
        pace.record(size, size * mean, seconds)
    found = pace.predict(tokens, context)
    assert (found is None) == (len(steps) < 2)
    if found is not None:
        assert isfinite(found)
        assert 0 <= found <= pace.predict(tokens + 1, context)
        assert 0 <= pace.seconds_for_prompt(0, tokens, 100) < inf


# ---------------------------------------------------------------- loads


def test_the_seconds_of_a_load_are_found():
    pace = LoadPace()
    assert pace.predict(10) is None
    pace = steady()
    assert pace.coefficients == pytest.approx((0.05, 1 / 1000), rel=1e-3)
    assert pace.predict(4000) == pytest.approx(4.05, rel=1e-3)


def test_loads_that_come_whole_are_predicted_at_their_size():
    pace = LoadPace()
    for _ in range(5):
        a_load(pace, (1000, 0.5), end=0.5)
    assert pace.predict(1000) == pytest.approx(0.5)
    assert 0.25 < pace.predict(500) < 0.5


@pytest.mark.parametrize(("before", "after", "num"), [(1000.0, 100.0, 3), (100.0, 1000.0, 1)])
def test_a_store_that_became_slow_or_fast_is_known_after_a_few_loads(before, after, num):
    pace = steady(rate=before)
    for _ in range(num):
        assert pace.predict(1000) == pytest.approx(0.05 + 1000 / before, rel=0.05)
        a_load(
            pace, (100, 0.05 + 100 / after), (1000, 0.05 + 1000 / after), end=0.05 + 1000 / after
        )
    assert pace.predict(1000) == pytest.approx(0.05 + 1000 / after, rel=0.05)


def test_loads_that_differ_little_are_averaged():
    pace = steady(first_byte_s=0.0)
    a_load(pace, (100, 0.15), (1000, 1.5), end=1.5)
    assert pace.predict(1000) == pytest.approx(1.25, rel=1e-3)


def test_a_small_part_of_a_load_does_not_replace_what_is_known():
    pace = steady(first_byte_s=0.0, rate=100.0)
    a_load(pace, (10, 0.1), (20, 0.1), end=1.0)
    assert pace.predict(1000) > 4


def test_silent_loads_put_off_the_first_byte_and_one_that_brings_something_ends_that():
    pace = steady(first_byte_s=0.001)
    a_load(pace, end=2.0)
    assert pace.coefficients[0] == 4.0
    a_load(pace, end=1.0)
    assert pace.coefficients[0] == 4.0, "a load that was given up earlier says no more"
    a_load(pace, (100, 0.101), (1000, 1.001), end=1.001)
    assert pace.coefficients[0] == pytest.approx(0.001, rel=0.01)


def test_a_store_that_was_always_silent_is_measured():
    pace = LoadPace()
    a_load(pace, end=2.0)
    assert pace.predict(16) > 1
    a_load(pace, end=0.1)
    assert pace.predict(16) > 1, "a load that was given up early says nothing"


def test_one_load_in_a_hundred_explores():
    pace = LoadPace()
    assert [n for n in range(1, 301) if pace.explores()] == [100, 200, 300]


def test_where_a_load_costs_little_more_are_explored_until_one_brings_something():
    pace = LoadPace()
    some = [4, 8, 16, 32, 64, 100, 200]
    assert [n for n in range(1, 201) if pace.explores(soon=True)] == some
    a_load(pace, (1000, 1.0), end=1.0)
    assert [n for n in range(1, 9) if pace.explores(soon=True)] == [4, 8]
    a_load(pace, (1000, 1.1), end=1.1)  # as slow as before
    assert [n for n in range(9, 33) if pace.explores(soon=True)] == [16, 32]
    a_load(pace, (1000, 0.1), end=0.1)  # far faster
    assert [n for n in range(1, 9) if pace.explores(soon=True)] == [4, 8]


def test_the_rest_of_a_load_falls_with_time_and_with_what_is_there():
    load = a_load(steady())
    assert load.rest(1000, 0.0) == pytest.approx(1.05, rel=1e-3)
    assert load.rest(500, 0.1) == pytest.approx(0.45, rel=1e-3)
    load.progress(500, 0.55)
    assert load.rest(500, 0.6) == pytest.approx(0.45, rel=1e-2)
    assert load.rest(0, 0.6) == load.rest(-5, 0.6) == 0.0


def test_a_load_comes_in_pieces():
    load = a_load(steady(first_byte_s=0.0, piece=100))
    assert load.rest(1, 0.0) == load.rest(100, 0.0) == pytest.approx(0.1, rel=1e-3)
    assert load.rest(101, 0.0) == pytest.approx(0.2, rel=1e-3)


def test_news_that_is_overdue_is_expected_after_as_long_again():
    load = a_load(steady(), (100, 0.15))
    on_time = load.rest(900, 0.25)
    assert on_time == pytest.approx(0.8, rel=0.01)
    assert load.rest(900, 5.25) == pytest.approx(0.8 + 5.0, rel=0.01)


def test_a_silence_as_long_as_those_of_earlier_loads_is_not_overdue():
    # 100 come at once, then nothing for half a second.
    pace = LoadPace()
    news = [(100, 0.1), (200, 0.1), (300, 0.6), (400, 0.6), (500, 1.1)]
    for _ in range(2):
        load = a_load(pace, *news, (1000, 1.6), end=1.6)
    load = a_load(pace, (100, 0.1))
    assert 0.05 < load.rest(100, 0.15) < 0.15, "by the rate, at first"
    assert load.rest(100, 0.3) == pytest.approx(0.3, rel=0.01), "until the longest silence is over"
    assert load.rest(100, 0.6) == pytest.approx(0.0, abs=0.01)
    assert load.rest(100, 1.0) == pytest.approx(0.4, rel=0.05)
    assert load.overdue_after() > 0.6
    for wanted in (0.2, 0.45, 0.6):
        wait = load.silence_for(wanted, 100, 0.15)
        assert load.rest(100, 0.15 + wait) >= wanted * (1 - 1e-6)
    assert 0.05 < load.silence_for(0.2, 100, 0.15) < 0.15


def test_an_unmeasured_load_is_expected_after_as_long_again():
    load = a_load(LoadPace())
    assert [load.rest(more, 0.3) for more in (1, 1000)] == [0.3, 0.3]
    load.progress(10, 0.3)
    assert load.rest(990, 0.5) == pytest.approx(0.2)
    assert not load.is_measured
    load.progress(20, 0.5)
    assert load.is_measured
    assert load.rest(500, 0.5) == pytest.approx(10.0)


def test_a_load_that_is_slower_than_its_store_was_is_predicted_by_itself():
    load = a_load(steady(first_byte_s=0.0), (100, 1.0), (500, 5.0))
    assert load.rest(500, 5.0) > 3


@given(
    st.lists(st.tuples(st.floats(0.1, 1e6), SECONDS), max_size=20),
    st.lists(st.tuples(st.floats(0.1, 1000), st.floats(0, 100)), max_size=5),
    st.floats(0, 1e4),
    st.floats(0, 1000),
    st.floats(0, 1000),
    st.floats(0, 1e3),
)
def test_the_rest_is_finite_and_grows_with_its_amount(loads, news, seconds, one, other, wanted):
    pace = LoadPace()
    for amount, took in loads:
        earlier = RunningLoad(pace, amount)
        earlier.progress(amount / 2, took / 2)
        earlier.progress(amount, took)
        earlier.end(took)
    load = a_load(pace, *zip(sorted(n for n, _ in news), sorted(s for _, s in news), strict=True))
    seconds += max((s for _, s in news), default=0.0)
    less, more = sorted((one, other))
    assert 0 <= load.rest(less, seconds) <= load.rest(more, seconds) < inf
    silence = load.silence_for(wanted, more, seconds)
    assert 0 <= silence < inf
    if more:
        assert load.rest(more, seconds + silence) >= wanted * (1 - 1e-6) - 1e-6
