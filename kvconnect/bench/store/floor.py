"""The floor of a store: the same bytes, moved in the plainest way that the machine has."""

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

T = TypeVar("T")

_REPEATS = 16


class Floor(ABC):
    """Moves `payloads` as fast as the machine can, without indexing, checking or keeping them.

    Attributes:
        name: shown beside the figures.
        overlaps: whether a checksum pass overlaps with the I/O; else its time is added.
    """

    name = ""
    overlaps = False

    def __init__(self, payloads: Payloads) -> None:
        self.payloads = payloads

    @abstractmethod
    def put(self) -> list[float]:
        """Returns the seconds to store all values, for each way of storing them; blocks."""

    @abstractmethod
    def get(self) -> list[float]:
        """Returns the seconds to load all values, for each way of loading them; blocks."""

    def hashed_put(self) -> list[float]:
        """Returns the seconds of `put` if each value is hashed by the thread that moves it.

        An empty list says that this is not measured.
        """
        return []

    def hashed_get(self) -> list[float]:
        """Returns the seconds of `get` if each value is hashed by the thread that moves it.

        An empty list says that this is not measured.
        """
        return []

    def lookup(self, keys: int) -> float | None:
        """Returns the seconds to find so many keys, or ``None`` if that is not measured."""
        return None

    def close(self) -> None:
        """Deletes the stored values and closes connections; does nothing by default."""


def checksum_seconds(payloads: Payloads) -> list[float]:
    """Returns the seconds of a checksum pass over all values, on one thread and on two; blocks."""
    views = [view(block.data) for block in payloads.blocks]
    return [seconds_on_threads(threads, xxhash.xxh3_128_digest, views) for threads in (1, 2)]


def fastest(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Returns the seconds of each round in the way with the smallest median.

    The fastest way of each round would be the one that was disturbed least. A measurement that is
    taken once in a round could not compete with it.
    """
    return min(map(list, zip(*rounds, strict=True)), key=statistics.median)


def seconds_on_threads(threads: int, work: Callable[[T], object], items: Sequence[T]) -> float:
    """Returns the seconds to do `work` with each of `items` on so many threads; blocks."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(id, range(threads)))  # the threads run before the time starts
        return seconds_of(lambda: list(pool.map(work, items)))


def median_seconds(work: Callable[[], object]) -> float:
    """Returns the seconds that `work` takes, as the median of several runs; blocks."""
    return statistics.median(seconds_of(work) for _ in range(_REPEATS))


def seconds_of(work: Callable[[], object]) -> float:
    """Returns the seconds that `work` takes; blocks."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
