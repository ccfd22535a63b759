"""Which checks of which store only the long form runs."""

from __future__ import annotations

import re

import pytest

# Most of these wait for deadlines, one after the other. Where the short form has what they demand:
# - faults: the store beneath is not asked, or its answer is replaced. Memory and Redis; of a disk
#   itself: resources, backends/test_disk_faults.py.
# - network: Redis, all of it. S3 has a server that refuses, is frozen or cuts off anywhere; answers
#   of a wrong length, of rubbish, and bytes that drip: backends/test_s3_lies.py, test_s3_faults.py.
# - the toy server is there for the contract of a store that is written in an hour.
LONG_FORM = {
    "TestDisk": re.compile(r"test_faults_"),
    "TestFolder": re.compile(r"test_faults_"),
    "TestTiered": re.compile(r"test_faults_"),
    "TestS3": re.compile(
        r"test_faults_|test_network_(black_hole|breaker|garbage_answers|half_open"
        r"|one_byte_per_second|slow_answers|wrong_length)"
    ),
    "TestS3Longer": re.compile(r"test_"),
    "TestToyServer": re.compile(r"test_(?!contract_)"),
}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark them."""
    pattern = LONG_FORM.get(getattr(getattr(item, "cls", None), "__name__", ""))
    if pattern is not None and pattern.match(item.name):
        item.add_marker(pytest.mark.slow)
