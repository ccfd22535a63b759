"""Which checks of which store only the long form runs."""

from __future__ import annotations

import re

import pytest

# Most of these wait for deadlines, one after the other. Where the short form has what they demand:
# - faults, and tokens whatever fails: the store beneath is not asked, or its answer is replaced.
#   Memory; of a disk itself: resources, backends/test_disk_faults.py.
# - network: Redis, all of it. S3 has a server that refuses or starts again; one that is frozen or
#   absent, that cuts off, lies or drips: backends/test_s3_faults.py, test_s3_lies.py.
# - a process that dies while it saves: Disk, the example and Tiered; S3 keeps whole objects.
# - keys, integrity, time and random runs of the example: Disk and Memory, by the same frames.
# - the toy server is there for the contract of a store that is written in an hour.
GUARD = r"test_faults_|test_end_to_end_same_tokens_whatever_fails"
LONG_FORM = {
    "TestDisk": re.compile(r"test_faults_"),
    "TestFolder": re.compile(rf"{GUARD}|test_(keys|integrity|time|model)_"),
    "TestTiered": re.compile(GUARD),
    "TestRedis": re.compile(GUARD),
    "TestS3": re.compile(
        rf"{GUARD}|test_crash_killed_while_saving|test_network_(black_hole|breaker|close_while"
        r"|frozen|garbage_answers|half_open|one_byte|reset|slow_answers|unreachable|wrong_length)"
    ),
    "TestS3Longer": re.compile(r"test_"),
    "TestToyServer": re.compile(r"test_(?!contract_)"),
}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark them."""
    pattern = LONG_FORM.get(getattr(getattr(item, "cls", None), "__name__", ""))
    if pattern is not None and pattern.match(item.name):
        item.add_marker(pytest.mark.slow)
