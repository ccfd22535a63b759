"""What the machine can do under a store: the same bytes moved in the plainest way there is."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import numpy as np
import xxhash

from kvconnect.backend import Backend
from kvconnect.backends.disk.direct_io import open_direct, view
from kvconnect.backends.disk.store import DiskBackend
from kvconnect.backends.memory.store import MemoryBackend
from kvconnect.bench.store.payloads import Payloads
from kvconnect.errors import ConfigurationError

__all__ = ["Floor", "checksum_seconds", "fastest", "make_floor"]

T = TypeVar("T")

_THREADS = (1, 2, 4)
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


def make_floor(url: str, store: Backend, payloads: Payloads) -> Floor | None:
    """The floor of an open `store`; ``None``: there is none for its kind."""
    if isinstance(store, MemoryBackend):
        return MemoryFloor(payloads)
    if isinstance(store, DiskBackend):
        return DiskFloor(payloads, store.path)
    if url.startswith(("redis:", "rediss:")):
        return RedisFloor(payloads, url)
    if url.startswith("s3:"):
        from kvconnect.bench.store.floor_s3 import open_floor

        return open_floor(url, payloads)
    return None


def checksum_seconds(payloads: Payloads) -> list[float]:
    """Seconds of one checksum pass over all values, on one thread and on two; blocks."""
    views = [view(block.data) for block in payloads.blocks]
    return [_on_threads(threads, xxhash.xxh3_128_digest, views) for threads in (1, 2)]


def fastest(rounds: Sequence[Sequence[float]]) -> list[float]:
    """The seconds of each round in the one way that is fastest in most of them.

    Not the fastest way of each round: that would be the one that happened to be disturbed least,
    and what is measured once in a round could not compete.
    """
    return min(map(list, zip(*rounds, strict=True)), key=statistics.median)


class MemoryFloor(Floor):
    """Copying between two places of memory that were touched before, on one thread or two."""

    name = "memcpy"

    def __init__(self, payloads: Payloads) -> None:
        super().__init__(payloads)
        whole = np.ones(payloads.total, np.uint8)
        self._kept = [whole[at : at + payloads.nbytes] for at in self._starts()]
        self._index = {key: number for number, key in enumerate(payloads.keys)}

    def put(self) -> list[float]:
        """All values, one after the other."""
        sources = [block.data.numpy() for block in self.payloads.blocks]
        return self._copy(sources, self._kept)

    def get(self) -> list[float]:
        """The same back."""
        return self._copy(self._kept, [data.numpy() for data in self.payloads.into])

    def lookup(self, keys: int) -> float:
        """In a dict."""
        asked = (self.payloads.keys * keys)[:keys]
        return _median_seconds(lambda: [self._index.get(key) for key in asked])

    def _starts(self) -> range:
        return range(0, self.payloads.total, self.payloads.nbytes)

    @staticmethod
    def _copy(
        sources: list[np.ndarray[Any, Any]], targets: list[np.ndarray[Any, Any]]
    ) -> list[float]:
        pairs = list(zip(targets, sources, strict=True))
        return [_on_threads(threads, lambda pair: np.copyto(*pair), pairs) for threads in (1, 2)]


class DiskFloor(Floor):
    """A slot for each value in one preallocated file, read and written past the page cache.

    With several numbers of threads. Keys are found in a SQLite table.

    Raises:
        ConfigurationError: the disk has no space for another file of so many bytes.
    """

    name = "O_DIRECT slots"
    overlaps = True

    def __init__(self, payloads: Payloads, directory: Path) -> None:
        super().__init__(payloads)
        self._scratch = tempfile.TemporaryDirectory(dir=directory, prefix="bench-")
        self._file = open_direct(Path(self._scratch.name) / "slots", os.O_RDWR | os.O_CREAT)
        try:
            os.posix_fallocate(self._file, 0, payloads.total)
        except OSError as error:
            os.close(self._file)
            self._scratch.cleanup()
            raise ConfigurationError(
                f"{directory}: no space for the {payloads.total} bytes of the file that the store "
                f"is compared with ({error.strerror}); free some, or measure with a smaller --total"
            ) from error
        self._db = sqlite3.connect(Path(self._scratch.name) / "index", isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("CREATE TABLE keys(key BLOB PRIMARY KEY, slot INTEGER) WITHOUT ROWID")
        rows = [(key, number) for number, key in enumerate(payloads.keys)]
        self._db.executemany("INSERT INTO keys VALUES(?, ?)", rows)
        self._pools = [ThreadPoolExecutor(threads) for threads in _THREADS]
        for pool in self._pools:
            self._write(pool)  # the first write to what was only allocated takes longer

    def put(self) -> list[float]:
        """Write all slots."""
        return [self._write(pool) for pool in self._pools]

    def get(self) -> list[float]:
        """Read all slots."""
        return [self._read(pool) for pool in self._pools]

    def hashed_put(self) -> list[float]:
        """Write all slots, each hashed before: what a checksum costs if nothing else does."""
        return [self._write(pool, xxhash.xxh3_128_digest) for pool in self._pools]

    def hashed_get(self) -> list[float]:
        """Read all slots, each hashed then."""
        return [self._read(pool, xxhash.xxh3_128_digest) for pool in self._pools]

    def lookup(self, keys: int) -> float:
        """One query."""
        asked = (self.payloads.keys * keys)[:keys]
        query = f"SELECT key FROM keys WHERE key IN ({','.join('?' * keys)})"  # noqa: S608  marks
        return _median_seconds(lambda: self._db.execute(query, asked).fetchall())

    def close(self) -> None:
        """Delete the file."""
        for pool in self._pools:
            pool.shutdown()
        self._db.close()
        os.close(self._file)
        self._scratch.cleanup()

    def _write(
        self, pool: ThreadPoolExecutor, before: Callable[[memoryview], object] = len
    ) -> float:
        size = self.payloads.nbytes
        sources = [view(block.data) for block in self.payloads.blocks]

        def write(number: int) -> int:
            before(sources[number])
            return os.pwrite(self._file, sources[number], number * size)

        return _seconds(lambda: list(pool.map(write, range(len(sources)))))

    def _read(self, pool: ThreadPoolExecutor, then: Callable[[memoryview], object] = len) -> float:
        size = self.payloads.nbytes
        targets = [view(data) for data in self.payloads.into]
        with contextlib.suppress(OSError):  # where there is no direct I/O
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

        def read(number: int) -> None:
            os.preadv(self._file, [targets[number]], number * size)
            then(targets[number])

        return _seconds(lambda: list(pool.map(read, range(len(targets)))))


class RedisFloor(Floor):
    """Raw sockets: one connection, requests written by hand."""

    name = "raw sockets"

    def __init__(self, payloads: Payloads, url: str) -> None:
        super().__init__(payloads)
        parts = urlsplit(url)
        raw = import_module("kvconnect.bench.store.floor_redis").RawRedis
        self._raw = raw(
            parts.hostname or "localhost",
            parts.port or 6379,
            [view(block.data) for block in payloads.blocks],
            [view(data) for data in payloads.into],
            password=None if parts.password is None else unquote(parts.password),
            username=unquote(parts.username or "default"),
            db=int(parts.path.strip("/") or 0),
        )

    def put(self) -> list[float]:
        """SET of all values under names that are free."""
        return [float(self._raw.put())]

    def get(self) -> list[float]:
        """GET of all values."""
        return [float(self._raw.get())]

    def lookup(self, keys: int) -> float:
        """EXISTS of each key, sent together."""
        return _median_seconds(lambda: self._raw.lookup(keys))

    def close(self) -> None:
        """Delete the values."""
        self._raw.close()


def _on_threads(threads: int, work: Callable[[T], object], items: Sequence[T]) -> float:
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(id, range(threads)))  # they are there when the time starts
        return _seconds(lambda: list(pool.map(work, items)))


def _median_seconds(work: Callable[[], object]) -> float:
    return statistics.median(_seconds(work) for _ in range(_REPEATS))


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
