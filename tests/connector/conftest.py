"""Fixtures of the connector's tests; `bench_engine` is importable from here on."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import recording
from stores import DictStore


@pytest.fixture
def script() -> recording.Script:
    """What the connector of this test answers, and what it was asked."""
    return recording.fresh_script()


@pytest.fixture
def store() -> Iterator[DictStore]:
    """An empty store, whose doors are open at the end."""
    store = DictStore()
    yield store
    store.open_doors()


@pytest.fixture(autouse=True)
def no_thread_is_left_behind() -> Iterator[None]:
    """Every test ends with the threads it began with."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 60
    while left := [one for one in threading.enumerate() if one not in before]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        left[0].join(0.05)
