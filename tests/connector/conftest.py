"""Fixtures of the connector's tests; `bench_engine` is importable from here on."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def no_thread_is_left_behind() -> Iterator[None]:
    """Every test ends with the threads it began with."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 60
    while left := [one for one in threading.enumerate() if one not in before]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        left[0].join(0.05)
