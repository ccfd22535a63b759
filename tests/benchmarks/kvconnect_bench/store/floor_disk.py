"""The floor of a disk: slots of one file past the page cache, keys in SQLite."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path

import xxhash

from kvconnect.backends.disk.files.direct_io import open_direct, view
from kvconnect.bench.store.floor import Floor, median_seconds, seconds_on_threads
from kvconnect.bench.store.payloads import Payloads
from kvconnect.errors import ConfigurationError

_THREADS = (1, 2, 4)


class DiskFloor(Floor):
    """A slot for each value in one preallocated file, read and written past the page cache.

    Reads and writes run on one, two and four threads. Keys are found in a SQLite table.

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
        self._write(1)  # the first write to space that was only allocated takes longer

    def put(self) -> list[float]:
        """Writes all slots with each number of threads; returns the seconds of each."""
        return [self._write(threads) for threads in _THREADS]

    def get(self) -> list[float]:
        """Reads all slots with each number of threads; returns the seconds of each."""
        return [self._read(threads) for threads in _THREADS]

    def hashed_put(self) -> list[float]:
        """Writes all slots, each hashed first; returns the seconds with each number of threads."""
        return [self._write(threads, xxhash.xxh3_128_digest) for threads in _THREADS]

    def hashed_get(self) -> list[float]:
        """Reads all slots and hashes each; returns the seconds with each number of threads."""
        return [self._read(threads, xxhash.xxh3_128_digest) for threads in _THREADS]

    def lookup(self, keys: int) -> float:
        """Returns the seconds of one query."""
        asked = self.payloads.asked(keys)
        query = f"SELECT key FROM keys WHERE key IN ({','.join('?' * keys)})"
        return median_seconds(lambda: self._db.execute(query, asked).fetchall())

    def close(self) -> None:
        """Deletes the file."""
        self._db.close()
        os.close(self._file)
        self._scratch.cleanup()

    def _write(self, threads: int, before: Callable[[memoryview], object] = len) -> float:
        size = self.payloads.nbytes
        sources = [view(block.data) for block in self.payloads.blocks]

        def write(number: int) -> int:
            before(sources[number])
            return os.pwrite(self._file, sources[number], number * size)

        return seconds_on_threads(threads, write, range(len(sources)))

    def _read(self, threads: int, then: Callable[[memoryview], object] = len) -> float:
        size = self.payloads.nbytes
        targets = [view(data) for data in self.payloads.into]
        with contextlib.suppress(OSError):  # where there is no direct I/O
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

        def read(number: int) -> None:
            os.preadv(self._file, [targets[number]], number * size)
            then(targets[number])

        return seconds_on_threads(threads, read, range(len(targets)))
