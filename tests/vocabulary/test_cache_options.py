"""The use of stores by one request: what may be said, and what it asks of retention."""

from __future__ import annotations

from datetime import timedelta

import pytest

from kvconnect import CacheOptions
from kvconnect.errors import ConfigurationError


def test_nothing_is_asked_by_default():
    plain = CacheOptions()
    assert (plain.load, plain.save, plain.retention()) == (True, True, None)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("1h", 3600), ("90", 90), ("500ms", 0.5), (60, 60), (0.5, 0.5), (timedelta(days=1), 86400)],
)
def test_a_ttl_has_any_unit(given, seconds):
    assert CacheOptions(ttl=given).ttl == seconds
    assert CacheOptions.given("cache", CacheOptions(ttl=given)).ttl == seconds


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"laod": False}, "unknown field 'laod'; did you mean 'load'"),
        ({"load": 0}, r"CacheOptions\.load=0"),
        ({"save": "no"}, r"CacheOptions\.save='no'"),
        *(({"priority": one}, r"CacheOptions\.priority=") for one in (-1, 101, 3.5, "80", True)),
        *(
            ({"ttl": one}, r"CacheOptions\.ttl=")
            for one in ("soon", "-1h", "0s", 0, -5, True, float("nan"), float("inf"), [1], 4e9)
        ),
        ({"ttl": "soon"}, "a duration such as 30s, 12h or 7d is needed"),
    ],
)
def test_what_is_wrong_is_named(fields, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        CacheOptions(**fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"priority": 80}, (80, None)),
        ({"priority": 80, "ttl": "1m"}, (80, 60_000)),
        ({"ttl": "1m"}, (35, 60_000)),
    ],
)
def test_the_worth_is_that_of_all_blocks(fields, expected):
    kept = CacheOptions(**fields).retention()
    (prompt,) = kept.token_range_retention_configs
    assert (prompt.token_start, prompt.token_end) == (0, None)
    assert (prompt.priority, prompt.duration_ms) == expected
    assert (kept.decode_retention_priority, kept.decode_duration_ms) == expected
