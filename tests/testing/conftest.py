"""Which checks of which store only the long form runs."""

from __future__ import annotations

import re

import pytest

# Each of these waits for deadlines, one after the other. On every network store the short form has
# a server that refuses, one that is frozen, and answers that are wrong, late or cut off anywhere.
LONG_FORM = {
    "TestS3": re.compile(r"test_network_(black_hole|half_open|slow_answers)"),
    # That the network's checks pass where they should is shown on Redis and S3.
    "TestToyServer": re.compile(r"test_network_"),
}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark them."""
    pattern = LONG_FORM.get(getattr(getattr(item, "cls", None), "__name__", ""))
    if pattern is not None and pattern.match(item.name):
        item.add_marker(pytest.mark.slow)
