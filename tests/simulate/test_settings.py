"""Sizes and retention rules, as users write them; and counts over time."""

from __future__ import annotations

import json

import pytest

from kvconnect.errors import ConfigurationError
from kvconnect.simulate.retention_policy import RetentionPolicy
from kvconnect.simulate.tally import Counts, Tally
from kvconnect.simulate.tier_size import TierSize

# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("32tokens", 1),
        ("33 tok", 2),
        ("2ktok", 63),
        ("1.5Mtok", 46_875),
        ("64KiB", 2),  # of 32 tokens of 1,000 bytes
        ("1GB", 31_250),
        ("31999B", 0),
        ("0", 0),
    ],
)
def test_sizes_are_whole_blocks(text, blocks):
    assert TierSize.parse(text, field="--device").num_blocks(32, 1000, field="--device") == blocks


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("500", "--host=500: has no unit"),
        ("9" * 400 + "tokens", r"must be below 2\^63 tokens"),
        ("5 apples", "--host=5 apples: a size such as"),
        ("-1GiB", "--host=-1GiB: a size such as"),
        ("", "--host=: a size such as"),
    ],
)
def test_a_bad_size_is_named(text, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        TierSize.parse(text, field="--host")


def test_bytes_need_to_know_how_many_a_token_takes():
    size = TierSize.parse("1GiB", field="--host")
    with pytest.raises(ConfigurationError, match=r"--host=1GiB: .* give --bytes-per-token"):
        size.num_blocks(32, None, field="--host")


# ---------------------------------------------------------------- retention


def ranges(policy: RetentionPolicy, system_length: int | None):
    config = policy.config(system_length, 1)
    return [
        (r.token_start, r.token_end, r.priority, r.duration_ms)
        for r in config.token_range_retention_configs
    ]


def test_without_rules_requests_ask_for_nothing():
    assert RetentionPolicy().config(5, 1) is None


def test_rules_name_parts_of_the_request():
    policy = RetentionPolicy(["system=90:600s", "prompt=50", "output=10:1m"])
    assert ranges(policy, 100) == [(0, 100, 90, 600_000.0), (100, None, 50, None)]
    config = policy.config(100, 1)
    assert (config.decode_retention_priority, config.decode_duration_ms) == (10, 60_000.0)
    assert ranges(policy, 0) == [(0, None, 50, None)]


def test_rules_name_tokens():
    assert ranges(RetentionPolicy(["0-64=80", "64-=20"]), None) == [
        (0, 64, 80, None),
        (64, None, 20, None),
    ]


def test_a_file_gives_every_request_the_same(tmp_path):
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({"decode_retention_priority": 7}))
    assert RetentionPolicy.from_file(str(path)).config(None, 1).decode_retention_priority == 7


@pytest.mark.parametrize(
    ("rules", "complaint"),
    [
        (["system"], "PART=PRIORITY"),
        (["sistem=90"], "PART=PRIORITY"),
        (["system=high"], "PART=PRIORITY"),
        (["0:0=90"], "token_end"),
        (["system=101"], "priority"),
        (["system=90:soon"], "a duration such as"),
        (["system=90", "system=80"], "system is given twice"),
        (["0-64=90", "32-=20"], "overlaps"),
        (["64-64=90"], "must be greater"),
    ],
)
def test_a_bad_rule_is_named(rules, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        RetentionPolicy(rules)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("{", "is no JSON"), ("[]", "must be an object"), ('{"decode": 1}', "unknown field 'decode'")],
)
def test_a_bad_file_is_named(tmp_path, text, complaint):
    path = tmp_path / "policy.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=complaint):
        RetentionPolicy.from_file(str(path))


# ---------------------------------------------------------------- counts over time


def test_buckets_stay_few_and_lose_nothing():
    tally = Tally()
    for second in range(5000):
        counts = tally.at(second + 0.5)
        counts.requests += 1
        counts.most_waiting = max(counts.most_waiting, second % 1000)
    assert len(tally.buckets) <= 240
    assert tally.width == 32
    assert tally.total() == Counts(requests=5000, most_waiting=999)
    assert all(bucket.requests == 32 for bucket in tally.buckets[:-1])


def test_rows_are_of_equal_length_and_add_up():
    tally = Tally()
    for second in (0, 1, 1.5, 2, 100):
        tally.at(second).requests += 1
    rows = tally.rows(10)
    assert len(rows) == 10
    assert [(start, end) for start, end, _ in rows[:2]] == [(0, 11), (11, 22)]
    assert [counts.requests for _, _, counts in rows] == [4, 0, 0, 0, 0, 0, 0, 0, 0, 1]


def test_a_long_pause_costs_nothing():
    tally = Tally()
    tally.at(0.0).requests += 1
    tally.at(1e12).requests += 1
    assert len(tally.buckets) <= 240
    assert tally.total().requests == 2
