"""The time to the first token: computed, loaded, or both until they meet."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import ConfigurationError
from kvconnect.overlap import Decision
from kvconnect.simulate.first_token import ExternalHit, FirstTokens, LoadRates, first_token_rows
from kvconnect.simulate.machine import Machine
from kvconnect.simulate.simulator import Simulator
from kvconnect.simulate.tier_size import TierSize

T = 16
ROUNDING = 1 + 1e-9

RATES = st.floats(1e-3, 1e9)
LOAD_RATES = st.builds(
    LoadRates,
    label=st.just("r"),
    load_tokens_per_s=RATES,
    prefill_tokens_per_s=RATES,
    tokens_per_block=st.sampled_from((1, 2, 16, 32)),
    store_first_byte_s=st.floats(0, 100),
    step_s=st.floats(0, 1),
    step_tokens=st.none() | st.integers(1, 4096),
)
HITS = st.builds(ExternalHit, tokens=st.integers(1, 5000), rest=st.integers(1, 5000))


def rates(load=1.0, prefill=1.0, **more) -> LoadRates:
    return LoadRates("r", load, prefill, T, **more)


# ---------------------------------------------------------------- what always holds


@given(LOAD_RATES, HITS)
def test_meeting_is_never_slower_than_the_better_one_alone(speed, hit):
    found = speed.first_token(hit)
    assert found.both_s <= min(found.computed_s, found.loaded_s)


@given(LOAD_RATES, HITS)
def test_no_place_to_meet_is_better(speed, hit):
    size, rest_s = speed.tokens_per_block, speed.compute_s(hit.rest)
    blocks = -(-hit.tokens // size)
    places = [
        max(speed.compute_s(count * size), speed.load_s(blocks - count)) + rest_s
        for count in range(1, blocks)
    ]
    found = speed.first_token(hit)
    assert found.both_s == min([found.computed_s, found.loaded_s, *places])
    if found.decision is Decision.BOTH:
        assert found.both_s < min(found.computed_s, found.loaded_s)


@given(st.integers(1, 300), RATES, st.integers(1, 5000))
def test_both_take_half_the_time_where_each_alone_takes_the_same(pairs, rate, rest):
    speed = rates(rate, rate)
    found = speed.first_token(ExternalHit(2 * pairs * T, rest))
    rest_s = speed.compute_s(rest)
    assert found.computed_s == pytest.approx(found.loaded_s)
    assert found.both_s - rest_s == pytest.approx((found.loaded_s - rest_s) / 2, abs=rest_s * 1e-9)


@given(RATES, RATES, st.integers(1, 300))
def test_rates_add_up_to_within_a_block(load, prefill, blocks):
    speed = rates(load, prefill)
    both_s = speed.first_token(ExternalHit(blocks * T, 1)).both_s - speed.compute_s(1)
    together = blocks * T / (load + prefill)
    rounding = speed.compute_s(1) * 1e-9
    assert both_s * ROUNDING + rounding >= together
    assert both_s <= (together + T / max(load, prefill)) * ROUNDING + rounding


@given(
    LOAD_RATES,
    HITS,
    st.sampled_from(
        ("load_tokens_per_s", "prefill_tokens_per_s", "store_first_byte_s", "step_s", "tokens")
    ),
    st.floats(1, 100),
)
def test_what_is_faster_or_shorter_never_takes_longer(speed, hit, what, factor):
    before = speed.first_token(hit).both_s
    if what == "tokens":
        after = speed.first_token(hit._replace(tokens=int(hit.tokens / factor) or 1)).both_s
    else:
        grows = what.endswith("_per_s")
        value = getattr(speed, what) * (factor if grows else 1 / factor)
        after = replace(speed, **{what: value}).first_token(hit).both_s
    assert after <= before * ROUNDING


# ---------------------------------------------------------------- decisions


@pytest.mark.parametrize(
    ("speed", "decision", "both_s"),
    [
        # 64 tokens in four blocks, then 16 more; one token a second.
        (rates(1, 1), Decision.BOTH, 32 + 16),
        (rates(1, 1, store_first_byte_s=16), Decision.BOTH, 48 + 16),
        # The first loaded block is there no sooner than the computed one.
        (rates(1, 1, store_first_byte_s=48), Decision.COMPUTE, 80),
        (rates(1, 1, store_first_byte_s=1e9), Decision.COMPUTE, 80),
        (rates(1 / 8, 1), Decision.COMPUTE, 80),
        # Not one block is computed by the time that all are loaded.
        (rates(8, 1), Decision.LOAD, 8 + 16),
        (rates(1, 1, step_s=50), Decision.COMPUTE, 50 + 80),
        (rates(1, 1, step_s=50, step_tokens=16), Decision.LOAD, 64 + 50 + 16),
        (rates(1, float("inf")), Decision.COMPUTE, 0),
    ],
)
def test_the_way_is_the_fastest(speed, decision, both_s):
    found = speed.first_token(ExternalHit(64, 16))
    assert (found.decision, found.both_s) == (decision, both_s)


def test_a_block_that_ends_inside_is_loaded_whole():
    assert rates(2, 1).first_token(ExternalHit(T + 1, 4)).loaded_s == 2 * T / 2 + 4


def test_a_single_block_is_loaded_or_computed():
    assert rates(2, 1).first_token(ExternalHit(T, 4)).decision is Decision.LOAD
    assert rates(1, 2).first_token(ExternalHit(T, 4)).decision is Decision.COMPUTE


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"load": 0.0}, "store_rate: r must be above 0"),
        ({"store_first_byte_s": -1}, "store_first_byte_s: -1 must be a number of seconds"),
        ({"store_first_byte_s": float("inf")}, "store_first_byte_s: inf"),
        ({"step_s": float("nan")}, "step_s: nan must be a number of seconds"),
        ({"step_tokens": 0}, "step_tokens: 0 must be at least 1"),
    ],
)
def test_a_bad_rate_is_named(settings, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        rates(**settings)


# ---------------------------------------------------------------- over a run


def test_the_simulator_keeps_the_prompts_that_the_store_has_a_part_of(request_of):
    a, b = request_of(range(1000, 1016)), request_of(range(2000, 2016))
    longer = request_of([*range(1000, 1016), *range(3000, 3006)])
    hits: list[ExternalHit] = []
    machine = Machine(device_blocks=6, external_blocks=100, tokens_per_block=4)
    sim = Simulator(machine, hits=hits)
    for request in (a, b, a, b, longer):
        sim.arrive(request)
    sim.finish()
    assert hits[0] == ExternalHit(7, 1)  # the device still has the other two blocks
    assert hits[-1].rest == 6
    total = sim.tally.total()
    assert sum(hit.tokens for hit in hits) == total.external_tokens


def test_times_are_summed_up_over_prompts():
    hits = [ExternalHit(T * 2 * n, T) for n in range(1, 11)]
    found = FirstTokens.of(rates(1, 1), hits)
    assert found.computed.mean == T * (1 + 11)
    assert found.both.mean == T * (1 + 5.5)
    assert found.both.median == T * (1 + 5.5)
    assert found.both.p90 == pytest.approx(T * (1 + 9.1))
    assert found.both.total == T * 65
    assert found.better == found.loaded == found.computed
    assert found.decisions == {Decision.COMPUTE: 0, Decision.LOAD: 0, Decision.BOTH: 10}


def test_a_model_that_takes_no_time_has_no_share_of_it():
    found = FirstTokens.of(rates(1, float("inf")), [ExternalHit(T, 1)])
    assert first_token_rows([found])[1][5] == "-"
    assert found.record()["prefill_tokens_per_s"] is None


@pytest.mark.parametrize(
    ("text", "tokens"), [("8ktok", 8000.0), ("1KiB", 1.024), ("1B", 0.001), ("0", 0.0)]
)
def test_a_rate_in_bytes_may_be_a_fraction_of_a_token(text, tokens):
    assert TierSize.parse(text, field="--store-rate").tokens(1000, field="--store-rate") == tokens
