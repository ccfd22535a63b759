"""What is computed beside a load: a hit is never slower than the better of loading and computing.

The simulation at the end has a clock of its own: a model whose step costs what `Model` says, and a
store that brings pieces from the end of the match.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvconnect.overlap import (
    Decision,
    LoadingPrompt,
    load_is_faster,
    meeting,
    next_chunk,
    next_chunk_behind,
    predict_alone,
    should_start,
)
from kvconnect.pace import LoadPace, RunningLoad, StepPace

T = 16
PREFILL = 8000


@dataclass(frozen=True)
class Model:
    """The true cost of steps: fixed, per token, and per token and context."""

    fixed_s: float = 0.004
    chunk: int = 2048

    def step_s(self, start: int, end: int) -> float:
        context = (start + end) / 2
        return self.fixed_s + (end - start) * (1 + context / 32_768) / PREFILL

    def prompt_s(self, start: int, end: int) -> float:
        firsts = range(start, end, self.chunk)
        return sum(self.step_s(first, min(end, first + self.chunk)) for first in firsts)

    def pace(self) -> StepPace:
        """Its pace once it is measured."""
        pace = StepPace()
        for tokens in (1, 16, 100, self.chunk):
            for start in (0, 1000, 20_000):
                self.record(pace, start, start + tokens)
        return pace

    def record(self, pace: StepPace, start: int, end: int) -> float:
        seconds = self.step_s(start, end)
        pace.record(end - start, (end - start) * (start + end) / 2, seconds)
        return seconds


@dataclass(frozen=True)
class Store:
    """A store that brings `piece` tokens at a time, after `first_byte_s`, at `rate` per second."""

    rate: float
    first_byte_s: float = 0.0
    piece: int = 64

    def loaded(self, total: int, seconds: float) -> int:
        come = (seconds - self.first_byte_s) * self.rate + 1e-6
        return min(total, max(0, int(come // self.piece) * self.piece))

    def when_s(self, amount: int) -> float:
        return self.first_byte_s + amount / self.rate

    def pace(self, total: int = 1024) -> LoadPace:
        """Its pace once it is measured."""
        pace = LoadPace()
        load = RunningLoad(pace, total)
        for amount in range(self.piece, total + 1, self.piece):
            load.progress(amount, self.when_s(amount))
        load.end(self.when_s(total))
        return pace


MODEL = Model()
FROZEN = Store(rate=1.0, first_byte_s=1e9)


def prompt_of(total, *, position=0, loaded_from=None, tail=1, block=T) -> LoadingPrompt:
    loaded_from = total if loaded_from is None else loaded_from
    return LoadingPrompt(position, loaded_from, total, total + tail, block)


def chunk_of(prompt, *, model=None, pace=None, news=(), seconds=0.0, **more):
    load = RunningLoad(pace or LoadPace(), prompt.match_end)
    for amount, at in news:
        load.progress(amount, at)
    more = {"max_tokens": MODEL.chunk} | more
    return next_chunk(prompt, model or MODEL.pace(), load, seconds=seconds, **more)


# ---------------------------------------------------------------- beside a measured load


def test_the_chunk_leads_to_where_both_meet():
    found = chunk_of(prompt_of(1024), pace=Store(rate=PREFILL).pace())
    end_s = MODEL.step_s(0, found.tokens)
    assert found.tokens % T == 0
    assert found.look_again_after is None
    assert found.predicted.decision is Decision.BOTH
    assert found.predicted.both_s == pytest.approx(
        max(end_s, (1024 - found.tokens) / PREFILL) + MODEL.step_s(1024, 1025), rel=0.1
    )
    assert found.predicted.computed_s == pytest.approx(MODEL.prompt_s(0, 1025), rel=1e-3)
    assert found.predicted.loaded_s == pytest.approx(
        1024 / PREFILL + MODEL.step_s(1024, 1025), rel=1e-3
    )


def test_nothing_is_computed_that_takes_longer_than_the_load():
    store = Store(rate=1e6)
    found = chunk_of(prompt_of(1024), pace=store.pace())
    assert found.tokens == 0
    assert found.predicted.decision is Decision.LOAD
    # The load is looked at again once its silence says that a block is worth while.
    block_s = MODEL.step_s(0, T)
    assert block_s / 2 < found.look_again_after <= block_s * 1.1
    later = chunk_of(prompt_of(1024), pace=store.pace(), seconds=found.look_again_after + 1e-3)
    assert later.tokens >= T


def test_all_is_computed_where_the_load_comes_too_late():
    found = chunk_of(prompt_of(1024, tail=100), pace=Store(rate=1e6, first_byte_s=2.0).pace())
    assert found.predicted.decision is Decision.COMPUTE
    assert found.tokens == 1124, "with what follows the match, in one step"


def test_a_long_way_to_the_meeting_is_cut_into_steps_of_whole_blocks():
    found = chunk_of(prompt_of(32_768, position=5), pace=Store(rate=PREFILL).pace(), max_tokens=200)
    assert (5 + found.tokens) % T == 0
    assert 200 - T < found.tokens <= 200


def test_a_part_is_computed_of_a_block_that_does_not_fit_the_step():
    assert chunk_of(prompt_of(1024), pace=Store(1000.0).pace(), max_tokens=T - 1).tokens == T - 1
    assert chunk_of(prompt_of(1024), pace=Store(1000.0).pace(), max_tokens=0).tokens == 0
    found = chunk_of(prompt_of(1024, position=9), pace=Store(1000.0).pace(), max_tokens=7)
    assert found.tokens == 7


def test_where_both_have_met_there_is_no_more_to_do():
    prompt = prompt_of(1024, position=512, loaded_from=512)
    found = chunk_of(prompt, pace=Store(1000.0).pace(), news=[(512, 0.5)], seconds=0.5)
    assert (found.tokens, found.look_again_after) == (0, None)


def test_what_is_loaded_is_not_computed():
    # One step through to the end would be cheaper than two, and would write into loaded blocks.
    prompt = prompt_of(576, position=512, loaded_from=560, tail=500)
    found = chunk_of(prompt, pace=Store(10.0).pace(), news=[(16, 1.6)], seconds=1.6)
    assert found.tokens == 48


# ---------------------------------------------------------------- unmeasured


def test_beside_an_unmeasured_load_a_block_waits_for_as_long_as_it_takes():
    block_s = MODEL.step_s(0, T)
    found = chunk_of(prompt_of(1024))
    assert (found.tokens, found.predicted) == (0, None)
    assert found.look_again_after == pytest.approx(block_s, rel=1e-3)
    assert chunk_of(prompt_of(1024), seconds=0.99 * block_s).tokens == 0
    assert chunk_of(prompt_of(1024), seconds=1.01 * block_s).tokens == T


def test_a_chunk_beside_an_unmeasured_load_takes_no_longer_than_its_silence():
    for seconds in (0.01, 0.02, 0.05, 0.1):
        found = chunk_of(prompt_of(32_768), seconds=seconds)
        assert seconds / 2 < MODEL.step_s(0, found.tokens) <= seconds * 1.001


def test_an_unmeasured_model_begins_with_one_block_after_some_silence():
    first = chunk_of(prompt_of(1024), model=StepPace())
    assert first.tokens == 0
    assert 0.02 <= first.look_again_after <= 0.04
    assert chunk_of(prompt_of(1024), model=StepPace(), seconds=0.041).tokens == T


def test_an_unmeasured_model_computes_nothing_beside_a_load_that_ends_soon():
    soon, late = (Store(rate).pace() for rate in (100_000.0, 1000.0))
    assert chunk_of(prompt_of(1024), model=StepPace(), pace=soon).tokens == 0
    assert chunk_of(prompt_of(1024), model=StepPace(), pace=late).tokens == T


def test_a_model_that_only_loads_is_measured_after_some_loads():
    store = Store(rate=10_000.0)  # a tenth of a second for the prompt
    pace = LoadPace()
    computed = []
    for _ in range(6):
        load = RunningLoad(pace, 1024)
        for piece in range(1, 5):
            load.progress(256.0 * piece, 256 * piece / store.rate)
        load.end(1024 / store.rate)
        computed.append(chunk_of(prompt_of(1024), model=StepPace(), pace=pace).tokens)
    assert computed[0] == 0
    assert computed[-3:] == [T] * 3


def test_an_unmeasured_model_computes_beside_a_load_that_has_stopped():
    prompt, news = prompt_of(256, loaded_from=224), [(16, 0.01), (32, 0.02)]
    assert chunk_of(prompt, model=StepPace(), news=news[:1], seconds=0.06).tokens == 0
    assert chunk_of(prompt, model=StepPace(), news=news, seconds=0.06).tokens == 0
    assert chunk_of(prompt, model=StepPace(), news=news, seconds=0.3).tokens == T


def test_steps_grow_by_four_beyond_what_was_measured():
    pace = StepPace()
    MODEL.record(pace, 0, 1)
    MODEL.record(pace, 0, T)
    assert chunk_of(prompt_of(4096), model=pace, seconds=9.0).tokens == 4 * T


# ---------------------------------------------------------------- beside others


def test_beside_others_nothing_is_computed_unless_the_load_takes_longer():
    slow, fast = Store(rate=PREFILL / 4).pace(), Store(rate=PREFILL * 2).pace()
    assert chunk_of(prompt_of(4096), pace=slow, alone=False).tokens > 0
    assert chunk_of(prompt_of(4096), pace=fast, alone=True).tokens > 0
    found = chunk_of(prompt_of(4096), pace=fast, alone=False)
    assert found.tokens == 0
    assert found.look_again_after > 0


def test_beside_others_only_their_spare_tokens_are_computed():
    found = chunk_of(prompt_of(4096), pace=Store(1000.0).pace(), alone=False, max_tokens=100)
    assert found.tokens == 96


def test_beside_others_a_frozen_load_is_computed_in_the_end():
    computed_s = MODEL.prompt_s(0, 1025)
    assert chunk_of(prompt_of(1024), seconds=0.5 * computed_s, alone=False).tokens == 0
    assert chunk_of(prompt_of(1024), seconds=1.5 * computed_s, alone=False).tokens == 1025


# ---------------------------------------------------------------- whether to load at all


def start(
    store: Store, pace: LoadPace | None = None, model: StepPace | None = None, **more
) -> bool:
    return should_start(
        prompt_of(1024), model or MODEL.pace(), pace or store.pace(), max_tokens=MODEL.chunk, **more
    )


def test_a_load_starts_that_saves_an_eighth_of_computing():
    assert start(Store(rate=PREFILL / 2))
    assert not start(Store(rate=PREFILL / 16))
    assert not start(Store(rate=1e6, first_byte_s=0.2))
    assert start(FROZEN, LoadPace())
    assert start(FROZEN, Store(rate=1.0).pace(), StepPace())


def test_prompts_that_share_the_model_wait_for_their_turns():
    """As many loads share the store, so that each is so much slower than alone."""
    assert not start(Store(rate=PREFILL / 2 / 4))
    assert start(Store(rate=PREFILL / 2 / 4), num_prompts=4)
    assert not start(Store(rate=PREFILL / 16 / 4), num_prompts=4)
    assert start(Store(rate=1e6, first_byte_s=0.2), num_prompts=4)


def test_some_loads_start_all_the_same():
    pace = Store(rate=1.0).pace()
    assert [n for n in range(1, 201) if start(FROZEN, pace)] == [4, 8, 16, 32, 64, 100, 200]
    slow = predict_alone(prompt_of(1024), MODEL.pace(), pace, amount=1024, max_tokens=2048)
    pace = Store(rate=1.0).pace()
    assert [n for n in range(1, 201) if load_is_faster(slow, pace)] == [100, 200]


def test_a_parked_request_is_loaded_if_that_is_faster():
    model, prompt = MODEL.pace(), prompt_of(4096, tail=300)
    for rate in (PREFILL / 2, PREFILL * 2):
        store = Store(rate)
        found = predict_alone(prompt, model, store.pace(), amount=4096, max_tokens=2048)
        assert found.loaded_s == pytest.approx(
            store.when_s(4096) + MODEL.prompt_s(4096, 4396), 0.01
        )
        assert found.computed_s == pytest.approx(MODEL.prompt_s(0, 4396), rel=0.01)
        assert found.both_s == min(found.loaded_s, found.computed_s)
        assert load_is_faster(found, store.pace()) == (rate > PREFILL)
    assert predict_alone(prompt, model, LoadPace(), amount=4096, max_tokens=2048) is None
    assert predict_alone(prompt, StepPace(), store.pace(), amount=4096, max_tokens=2048) is None
    assert load_is_faster(None, LoadPace())


# ---------------------------------------------------------------- what always holds


@given(st.lists(st.floats(0, 9), min_size=1, max_size=30), st.data())
def test_no_place_to_meet_is_better(computed, data):
    size = len(computed)
    computed = sorted(computed)
    loaded = sorted(data.draw(st.lists(st.floats(0, 9), min_size=size, max_size=size)))[::-1]
    places = [max(pair) for pair in zip(computed, loaded, strict=True)]
    count, seconds = meeting(size, lambda n: computed[n - 1], lambda n: loaded[n - 1])
    assert seconds == places[count - 1] == min(places)


@st.composite
def situations(draw):
    """A prompt that is being loaded, its load, and the paces of both."""
    block = draw(st.sampled_from((1, 16, 32)))
    match_end = draw(st.integers(1, 9000))
    loaded_from = draw(
        st.just(match_end) | st.integers(0, (match_end - 1) // block).map(lambda n: n * block)
    )
    position = draw(st.integers(0, loaded_from))
    prompt = LoadingPrompt(
        position, loaded_from, match_end, match_end + draw(st.integers(1, 3000)), block
    )
    model = StepPace()
    for tokens in draw(st.lists(st.sampled_from((1, 16, 500, 2048)), max_size=6)):
        model.record(tokens, tokens * 100.0, draw(st.floats(1e-4, 2)))
    pace = LoadPace()
    if draw(st.booleans()):
        pace = Store(draw(st.floats(1, 1e6)), draw(st.floats(0, 3))).pace()
    load = RunningLoad(pace, match_end)
    seconds = draw(st.floats(0, 10))
    load.progress(match_end - loaded_from, seconds)
    return prompt, model, load, seconds + draw(st.floats(0, 10))


@settings(max_examples=60)
@given(situations(), st.integers(1, 4096), st.booleans())
def test_a_chunk_is_within_what_is_missing_and_the_step(situation, max_tokens, alone):
    prompt, model, load, seconds = situation
    found = next_chunk(prompt, model, load, seconds=seconds, max_tokens=max_tokens, alone=alone)
    end = prompt.position + found.tokens
    assert 0 <= found.tokens <= max_tokens
    if prompt.loaded_from < prompt.match_end:
        assert end <= prompt.loaded_from
    assert end <= prompt.prompt_end
    first = prompt.end_of(1) - prompt.position
    if found.tokens and end < prompt.match_end and end != prompt.loaded_from:
        assert end % prompt.tokens_per_block == 0 or found.tokens == max_tokens < first
    if not found.tokens and first > 0:
        assert found.look_again_after > 0, "no load is waited for without end"
    if found.predicted is not None:
        assert all(isfinite(s) and s >= 0 for s in found.predicted[:3])


@settings(max_examples=60)
@given(situations(), st.integers(1, 4096))
def test_a_chunk_ends_with_the_load_or_ends_the_prompt_sooner(situation, max_tokens):
    prompt, model, load, seconds = situation
    found = next_chunk(prompt, model, load, seconds=seconds, max_tokens=max_tokens)
    assume(found.tokens and model.reach >= found.tokens)
    end = prompt.position + found.tokens
    chunk_s = model.seconds_for_prompt(prompt.position, end, max_tokens)
    rest_s = load.rest(prompt.loaded_from - prompt.position, seconds)
    tail_s = model.seconds_for_prompt(
        prompt.match_end, prompt.prompt_end, min(max_tokens, model.reach)
    )
    assert chunk_s <= (rest_s + (tail_s if end > prompt.match_end else 0)) * (1 + 1e-9)
    if found.predicted is not None:
        assert found.predicted.both_s <= min(found.predicted[:2]) * (1 + 1e-9)


# ---------------------------------------------------------------- the time to the first token


def first_token_s(
    model: Model, store: Store, total: int, steps: StepPace, loads: LoadPace
) -> float:
    """The seconds to the first token of a prompt of which the store has all but one token."""
    seconds, position = 0.0, 0
    prompt = prompt_of(total)
    if should_start(prompt, steps, loads, max_tokens=model.chunk):
        load = RunningLoad(loads, total)
        while True:
            loaded = store.loaded(total, seconds)
            load.progress(loaded, store.when_s(loaded))
            if position >= total - loaded:
                position = max(position, total)
                break
            found = next_chunk(
                prompt_of(total, position=position, loaded_from=total - loaded),
                steps,
                load,
                seconds=seconds,
                max_tokens=model.chunk,
            )
            if found.tokens:
                seconds += model.record(steps, position, position + found.tokens)
                position += found.tokens
            else:
                news_s = store.when_s(min(total, loaded + store.piece))
                seconds = min(seconds + found.look_again_after, news_s)
        load.end(seconds)
    while position < total + 1:
        end = min(total + 1, position + model.chunk)
        seconds += model.record(steps, position, end)
        position = end
    return seconds


def best_s(model: Model, store: Store, total: int) -> float:
    """The seconds of the best plan that knows everything."""
    met = (
        max(model.prompt_s(0, end), store.when_s(total - end // store.piece * store.piece))
        for end in range(T, total, T)
    )
    return min(met) + model.step_s(total, total + 1)


FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 16)
TOTALS = (1024, 2048, 4096, 8192, 16_384, 32_768)


@pytest.mark.parametrize("first_byte_s", [0.0, 0.05])
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("model", [MODEL, Model(0.02), Model(0.001, 512)], ids=str)
def test_a_hit_is_as_fast_as_the_better_one_alone(model, factor, first_byte_s):
    store = Store(PREFILL * factor, first_byte_s)
    for total in TOTALS:
        computed = model.prompt_s(0, total + 1)
        loaded = store.when_s(total) + model.step_s(total, total + 1)
        better, worse = sorted((computed, loaded))
        steps, loads = model.pace(), LoadPace()
        first_token_s(model, store, total, steps, loads)
        ours = first_token_s(model, store, total, steps, loads)
        assert ours <= 1.05 * better
        if worse <= 1.5 * better and ours > 0.65 * better:
            # The step after the match, or the first byte, leaves no better plan.
            assert ours <= 1.13 * best_s(model, store, total)
            assert total <= 2048


@pytest.mark.parametrize("total", TOTALS)
@pytest.mark.parametrize("steps", [MODEL.pace, StepPace], ids=["measured", "unmeasured"])
def test_the_first_hit_of_all_is_as_fast_as_a_fast_store(total, steps):
    for factor in (4, 16):
        store = Store(PREFILL * factor)
        loaded = store.when_s(total) + MODEL.step_s(total, total + 1)
        assert first_token_s(MODEL, store, total, steps(), LoadPace()) <= 1.15 * loaded
        distant = Store(PREFILL * factor, 0.05)
        ours = first_token_s(MODEL, distant, total, steps(), LoadPace())
        assert ours <= (1.15 if total > 2048 else 1.4) * (loaded + 0.05)


@pytest.mark.parametrize("total", TOTALS)
@pytest.mark.parametrize("steps", [MODEL.pace, StepPace], ids=["measured", "unmeasured"])
def test_a_frozen_store_costs_a_block_and_the_steps_that_double(total, steps):
    computed, block_s = MODEL.prompt_s(0, total + 1), MODEL.step_s(0, T)
    ours = first_token_s(MODEL, FROZEN, total, steps(), LoadPace())
    # Each step beside the silent load takes as long as the silence before it: a few more steps.
    few_s = 0.0 if total > 2048 else 4 * MODEL.fixed_s
    silent_s = 0.04 if steps is StepPace else 0.0  # once, before the first step of a process
    assert ours <= 1.05 * computed + block_s + few_s + silent_s


def test_a_store_that_stays_frozen_is_not_asked_any_more():
    steps, loads = MODEL.pace(), LoadPace()
    times = [first_token_s(MODEL, FROZEN, 4096, steps, loads) for _ in range(3)]
    assert times[-1] == pytest.approx(MODEL.prompt_s(0, 4097))


def test_a_load_that_freezes_halfway_costs_little():
    class Freezing(Store):
        def loaded(self, total, seconds):
            return min(super().loaded(total, seconds), 1024)

        def when_s(self, amount):
            return super().when_s(amount) if amount <= 1024 else inf

    steps, loads = MODEL.pace(), Store(PREFILL * 4).pace()
    ours = first_token_s(MODEL, Freezing(PREFILL * 4), 8192, steps, loads)
    assert ours <= 1.05 * MODEL.prompt_s(0, 8193)


# ---------------------------------------------------------------------- beside another engine


Head = Callable[[float], int]


def seconds_behind(head_at: Head, end: int, *, measured: bool = True, alone: bool = True) -> float:
    """The seconds until all is there, where `head_at` says what the other engine has brought."""
    pace = MODEL.pace() if measured else StepPace()
    now, position, head = 0.0, 0, 0
    while True:
        head = max(head, head_at(now))
        position = max(position, head)
        if position >= end - 1:
            return now + (MODEL.step_s(position, end) if position < end else 0.0)
        prompt = LoadingPrompt(position, end - 1, end - 1, end, T)
        chunk = next_chunk_behind(
            prompt,
            pace,
            begun=0,
            seconds=now,
            head=head,
            max_tokens=MODEL.chunk,
            step_tokens=MODEL.chunk,
            alone=alone,
        )
        if chunk.tokens:
            now += MODEL.record(pace, position, position + chunk.tokens)
            position += chunk.tokens
        else:
            assert chunk.look_again_after is not None
            until = now + chunk.look_again_after
            while now < until and head_at(now) <= head:
                now += 0.001
        if position == end:
            return now


@pytest.mark.parametrize("end", [4000, 16_000, 32_000])
@pytest.mark.parametrize("stops_at", [0, 100, 1024, 3000, 12_000])
@pytest.mark.parametrize("rate", [3000, 8000, 30_000])
def test_an_engine_that_stops_at_any_point_costs_what_computing_costs(end, stops_at, rate):
    alone = MODEL.prompt_s(0, end)
    seconds = seconds_behind(lambda now: min(stops_at, int(now * rate)) // T * T, end)
    assert seconds <= 1.05 * alone


def test_a_model_that_is_not_measured_computes_beside_a_silent_engine():
    assert seconds_behind(lambda _: 0, 8000, measured=False) <= 1.2 * MODEL.prompt_s(0, 8000)


@pytest.mark.parametrize("rate", [12_000, 30_000])
def test_beside_a_faster_engine_hardly_anything_is_computed(rate):
    """Its chunks come at once, 1,000 tokens at a time."""
    end = 16_000
    there = (end - 1) / rate
    seconds = seconds_behind(lambda now: min(end - 1, int(now * rate) // 1000 * 1000), end)
    assert seconds <= 1.12 * there + 2 * MODEL.step_s(end - 1, end)


def test_nothing_is_computed_while_the_other_engine_is_ahead():
    pace = MODEL.pace()
    computed_s = MODEL.prompt_s(0, 2048)
    for position, tokens in ((2048, 0), (1600, 1)):
        prompt = LoadingPrompt(position, 7999, 7999, 8000, T)
        chunk = next_chunk_behind(
            prompt,
            pace,
            begun=0,
            seconds=computed_s,
            head=position,
            max_tokens=2048,
            step_tokens=2048,
        )
        assert bool(chunk.tokens) == bool(tokens)
        # A step under way delays what comes.
        assert MODEL.step_s(position, position + chunk.tokens) <= max(
            0.1 * computed_s, 12 * MODEL.fixed_s + MODEL.step_s(position, position + T)
        )


def test_beside_other_requests_the_other_engine_has_to_be_late():
    end, slow = 8000, 7000
    head = lambda now: min(end - 1, int(now * slow)) // T * T + (now * slow >= end)  # noqa: E731
    pace = MODEL.pace()
    at = MODEL.prompt_s(0, 2048) * 1.1
    prompt = LoadingPrompt(2048, 7999, 7999, 8000, T)
    options = {"begun": 0, "seconds": at, "head": 2048, "max_tokens": 64, "step_tokens": 2048}
    assert next_chunk_behind(prompt, pace, **options).tokens
    assert not next_chunk_behind(prompt, pace, **options, alone=False).tokens
    assert seconds_behind(head, end, alone=False) <= 1.3 * MODEL.prompt_s(0, end)
