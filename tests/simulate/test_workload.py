"""Synthetic traces: what they hold, and that they are the same each time."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise

import pytest

from kvconnect.errors import ConfigurationError
from kvconnect.simulate.trace_reader import TraceReader
from kvconnect.simulate.workload import KINDS, Workload


def records(num_requests=2000, **more):
    return [json.loads(text) for text in Workload(num_requests, **more).lines()]


def ids(record):
    return [*record["hash_ids"], *record["output_hash_ids"]]


def sessions(found):
    """Requests by the first stretch after the system prompt, which is one session's alone."""
    by_session = defaultdict(list)
    for record in found:
        by_session[ids(record)[record["system_length"] // 512]].append(record)
    return list(by_session.values())


def test_equal_settings_give_equal_traces():
    assert records(seed=1) == records(seed=1) != records(seed=2)


def test_every_line_can_be_read(write_trace):
    path = write_trace(text.rstrip() for text in Workload(500).lines())
    with TraceReader(path) as trace:
        assert len(list(trace)) == 500


def test_times_rise_and_the_rate_is_about_what_was_asked_for():
    found = records(10_000, requests_per_s=20)
    times = [record["timestamp"] for record in found]
    assert times == sorted(times)
    middle = times[4_000], times[-1]
    assert 6_000 / (middle[1] - middle[0]) * 1000 == pytest.approx(20, rel=0.15)


def test_single_prompts_arrive_as_a_poisson_process():
    found = records(8_000, mix={"prompt": 1}, requests_per_s=5)
    gaps = [b["timestamp"] - a["timestamp"] for a, b in pairwise(found)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(200, rel=0.05)
    assert variance**0.5 == pytest.approx(mean, rel=0.05)


def test_the_mix_is_about_what_was_asked_for():
    found = records(15_000, mix={"prompt": 1, "agent": 3})
    agents = 3072  # twice the system prompt of the others
    count = Counter(record["system_length"] for record in found)
    assert count[agents] / len(found) == pytest.approx(0.75, abs=0.08)
    assert set(count) == {1536, agents}


def test_a_later_turn_begins_with_the_earlier_one_and_its_answer():
    turns = [found for found in sessions(records()) if len(found) > 1]
    assert len(turns) > 50
    for found in turns:
        for before, after in pairwise(found):
            assert before["timestamp"] < after["timestamp"]
            length = before["input_length"] + before["output_length"]
            assert after["input_length"] > length
            assert after["hash_ids"][: len(ids(before))] == ids(before)


def test_sessions_share_system_prompts_and_nothing_else():
    seen: dict[int, int] = {}
    for number, found in enumerate(sessions(records())):
        for record in found:
            for stretch in ids(record)[record["system_length"] // 512 :]:
                assert seen.setdefault(stretch, number) == number


def test_the_first_system_prompt_is_used_most():
    found = records(5000, mix={"prompt": 1}, system_prompts=4)
    used = Counter(record["hash_ids"][0] for record in found)
    shares = [count / len(found) for _, count in sorted(used.items())]
    whole = 1 + 1 / 2 + 1 / 3 + 1 / 4
    assert shares == pytest.approx([1 / (n * whole) for n in range(1, 5)], abs=0.03)


@pytest.mark.parametrize("kind", KINDS)
def test_no_request_gets_longer_than_it_may(kind):
    found = records(mix={kind: 1}, max_tokens=4096)
    longest = max(record["input_length"] + record["output_length"] for record in found)
    assert longest <= 4096
    assert min(min(record["input_length"], record["output_length"]) for record in found) >= 1


def test_stretches_are_as_long_as_was_asked_for(write_trace):
    path = write_trace(text.rstrip() for text in Workload(200, hash_tokens=64).lines())
    with TraceReader(path, hash_tokens=64) as trace:
        assert sum(1 for _ in trace) == 200


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"num_requests": 0}, "num_requests: 0 must be at least 1"),
        ({"requests_per_s": 0}, "requests_per_s: 0 must be between"),
        ({"requests_per_s": float("nan")}, "requests_per_s: nan must be between"),
        ({"mix": {"chatt": 1}}, "mix: 'chatt' is unknown; did you mean 'chat'"),
        ({"mix": {"chat": -1}}, "mix: chat=-1 must be 0 or more"),
        ({"mix": {"chat": 0}}, "at least one kind"),
        ({"system_prompts": 0}, "system_prompts: 0"),
        ({"hash_tokens": 7}, "hash_tokens: 7 must be even"),
        ({"max_tokens": 3000}, "max_tokens: 3000 leaves no room"),
    ],
)
def test_a_bad_setting_is_named(settings, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        Workload(**({"num_requests": 10} | settings))
