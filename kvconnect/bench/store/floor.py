"""What the machine can do under a store: the same bytes moved in the plainest way there is."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import xxhash

from kvconnect.backends.disk.files.direct_io import view
from kvconnect.bench.store.payloads import Payloads

__all__ = [
    "Floor",
    "checksum_seconds",
    "fastest",
    "median_seconds",
    "seconds_of",
    "seconds_on_threads",
]

T = TypeVar("T")

_REPEATS = 16


class Floor(ABC):
    """Moves `payloads` once, as fast as it goes; nothing is indexed, checked or kept.

    Attributes:
        name: what it is.
        overlaps: a checksum pass hides behind the I/O; else it comes on top of it.
    """

    name = ""
    overlaps = False

    def __init__(self, payloads: Payloads) -> None:
        self.payloads = payloads

    @abstractmethod
    def put(self) -> list[float]:
        """Seconds to bring all values there, in each of the ways there are; blocks."""

    @abstractmethod
    def get(self) -> list[float]:
        """Seconds to bring all values back, in each of the ways there are; blocks."""

    def hashed_put(self) -> list[float]:
        """As `put`, each value hashed by the thread that moves it; nothing: not measured."""
        return []

    def hashed_get(self) -> list[float]:
        """As `get`, likewise."""
        return []

    def lookup(self, keys: int) -> float | None:
        """Seconds to find so many keys; ``None``: not measured."""
        return None

    def close(self) -> None:
        """Leave nothing behind."""


def checksum_seconds(payloads: Payloads) -> list[float]:
    """Seconds of one checksum pass over all values, on one thread and on two; blocks."""
    views = [view(block.data) for block in payloads.blocks]
    return [seconds_on_threads(threads, xxhash.xxh3_128_digest, views) for threads in (1, 2)]


def fastest(rounds: Sequence[Sequence[float]]) -> list[float]:
    """The seconds of each round in the one way that is fastest in most of them.

    Not the fastest way of each round: that would be the one that happened to be disturbed least,
    and what is measured once in a round could not compete.
    """
    return min(map(list, zip(*rounds, strict=True)), key=statistics.median)


def seconds_on_threads(threads: int, work: Callable[[T], object], items: Sequence[T]) -> float:
    """Seconds to do `work` with each of `items` on so many threads; blocks."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(id, range(threads)))  # they are there when the time starts
        return seconds_of(lambda: list(pool.map(work, items)))


def median_seconds(work: Callable[[], object]) -> float:
    """Seconds that `work` takes, as the median of several; blocks."""
    return statistics.median(seconds_of(work) for _ in range(_REPEATS))


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds that `work` takes; blocks."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
