"""The subjects of backends that come with this package, of URLs and of plain functions."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

from kvconnect.backend import Backend
from kvconnect.backends.disk.format import INDEX_NAME
from kvconnect.backends.disk.settings import Durability
from kvconnect.backends.disk.store import DiskBackend
from kvconnect.backends.guard.store import GuardedBackend
from kvconnect.backends.memory.store import MemoryBackend
from kvconnect.backends.registry import open_backend
from kvconnect.backends.tiered.store import TieredBackend
from kvconnect.backends.url import StoreUrl, without_passwords
from kvconnect.errors import ConfigurationError
from kvconnect.keys import BlockKey
from kvconnect.testing.framed_values import FramedValues
from kvconnect.testing.subject import Subject, Unsupported, Usage


class FunctionSubject(Subject):
    """The subject of the backends that a function makes."""

    tidy: ClassVar[bool] = True

    def __init__(self, make: Callable[[], Backend]) -> None:
        self._make = make

    def make_backend(self) -> Backend:
        """Calls the function."""
        return self._make()


class UrlSubject(Subject):
    """The backend of a store URL, codecs included.

    Attributes:
        small: the URL of a bounded store on another, empty medium, with ``{capacity}`` for its
            capacity in bytes. Enables the checks of full stores.
    """

    tidy: ClassVar[bool] = True
    small: str | None = None

    def __init__(self, url: str) -> None:
        self.url = url

    def make_small(self, capacity: int) -> Backend:
        """Makes the backend of `small`."""
        if self.small is None:
            raise Unsupported("--small URL is not given: it names a bounded store")
        return open_backend(self.small.replace("{capacity}", str(capacity))).inner

    def make_backend(self) -> Backend:
        """Makes the bare backend."""
        return open_backend(self.url).inner

    def store_url(self) -> str:
        """Returns the URL."""
        return self.url

    def make_guarded(self, deadline_s: float) -> GuardedBackend:
        """Makes the guarded backend, with the codecs of the URL."""
        return open_backend(self.url, deadline_s=deadline_s)


class TieredSubject(UrlSubject):
    """The subject of ``tiered:``, whose tiers take only frames."""

    keeps_copies = True  # in the memory of each process, for one
    ends_cancelled = True
    skip: ClassVar[Mapping[str, str]] = {
        "resources.no_descriptors": "a tier that fails counts as empty: what it has may be dropped",
    }

    def make_backend(self) -> Backend:
        """Makes the backend with a frame around each value."""
        return FramedValues(super().make_backend())


class MemorySubject(Subject):
    """The subject of ``memory:``."""

    ends_cancelled = True

    def make_backend(self) -> Backend:
        """Makes a store of 64 MiB, which has room for the one large value."""
        return MemoryBackend(64 << 20)

    def store_url(self) -> str:
        """Returns a URL like `make_backend`; each process has its own store."""
        return "memory:?capacity=64MiB"

    def make_small(self, capacity: int) -> Backend:
        """Makes a store of `capacity` bytes."""
        return MemoryBackend(capacity)

    async def usage(self, backend: Backend) -> Usage:
        """Returns the bytes that it reports, because no others can be measured."""
        used = (await backend.stats())["bytes"]
        return Usage(used, used)


class DiskSubject(Subject):
    """The subject of ``disk:`` in a directory, which it may damage.

    Attributes:
        directory: the directory of the store. Others are made beside it.
        durability: the durability of the store, see `DiskBackend`.
    """

    ends_cancelled = True
    kill_points = ("reserved", "written", "committing", "evicted")

    directory: Path
    durability: Durability = "process"

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def make_backend(self) -> Backend:
        """Makes a store of 4 GiB, which it never fills."""
        return DiskBackend(self.directory, capacity=4 << 30, durability=self.durability)

    def store_url(self) -> str:
        """Returns the URL of `make_backend`."""
        return f"disk://{quote(str(self.directory))}?capacity=4GiB&durability={self.durability}"

    def make_small(self, capacity: int) -> Backend:
        """Makes a store in a directory of its own."""
        return DiskBackend(self.directory.with_name(f"small-{capacity}"), capacity=capacity)

    def make_expiring(self, ttl_s: float) -> Backend:
        """Makes a store in the same directory."""
        return DiskBackend(self.directory, capacity=1 << 30, ttl=ttl_s)

    def make_in(self, directory: Path) -> Backend:
        """Makes a store in another directory."""
        return DiskBackend(directory, capacity=1 << 30)

    def arm(self, backend: Backend, at: Callable[[str], None]) -> None:
        """Sets the hook of the store."""
        if isinstance(backend, DiskBackend):
            backend.at = at

    async def peek(self, backend: Backend, key: BlockKey) -> bytes | None:
        """Reads the block's slot, found with a separate connection to the index."""
        return await asyncio.to_thread(self._peek, key)

    async def poke(self, backend: Backend, key: BlockKey, data: bytes) -> None:
        """Writes into the block's slot; a shorter value also updates the length in its row.

        Raises:
            Unsupported: the value is longer than the slot.
        """
        await asyncio.to_thread(self._poke, key, data)

    async def usage(self, backend: Backend) -> Usage:
        """Returns the bytes of the data files, which include leaked slots."""
        if not isinstance(backend, DiskBackend):
            raise Unsupported("not a disk store")
        stats = await backend.stats()
        slots = await asyncio.to_thread(_slot_nbytes, backend.path)
        found = await asyncio.to_thread(_segment_nbytes, backend.path)
        return Usage(min(stats["file_bytes"], slots), found)

    def _place(self, key: BlockKey) -> tuple[Path, int, int, int] | None:
        with closing(sqlite3.connect(self.directory / INDEX_NAME)) as db:
            row = db.execute(
                "SELECT segment, slot, size, length FROM blocks WHERE key=?", (key,)
            ).fetchone()
        if row is None:
            return None
        segment, slot, size, length = row
        (file,) = self.directory.glob(f"segment-{segment:06d}-{size}.slots")
        return file, slot * size, size, length

    def _peek(self, key: BlockKey) -> bytes | None:
        place = self._place(key)
        if place is None:
            return None
        file, offset, _, length = place
        with file.open("rb") as data:
            data.seek(offset)
            return data.read(length)

    def _poke(self, key: BlockKey, data: bytes) -> None:
        place = self._place(key)
        if place is None:
            raise Unsupported("nothing is stored under the key")
        file, offset, size, length = place
        if len(data) > size:
            raise Unsupported(f"{len(data)} bytes do not fit a slot of {size}")
        with file.open("r+b") as slots:
            slots.seek(offset)
            slots.write(data)
            slots.flush()
            os.fsync(slots.fileno())
        if len(data) != length:
            with closing(sqlite3.connect(self.directory / INDEX_NAME, timeout=30)) as db, db:
                db.execute("UPDATE blocks SET length=? WHERE key=?", (len(data), key))


def _slot_nbytes(directory: Path) -> int:
    """Returns the bytes of all slots that hold a block or are free for one."""
    with closing(sqlite3.connect(directory / INDEX_NAME)) as db:
        (nbytes,) = db.execute(
            "SELECT (SELECT coalesce(sum(size), 0) FROM blocks)"
            " + (SELECT coalesce(sum(size * (slots - fresh)), 0) FROM segments)"
            " + (SELECT coalesce(sum(s.size), 0) FROM free JOIN segments AS s ON s.id = segment)"
        ).fetchone()
    return int(nbytes)


def _segment_nbytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("segment-*"))


def subject_of(url: str, *, small: str | None = None) -> Subject:
    """Returns the subject that enables most checks of the store at `url`.

    For a disk store it uses a new directory below the store's, so that stored blocks stay.

    Args:
        url: the URL of the store.
        small: see `UrlSubject`; ``memory:`` and ``disk:`` need none.

    Raises:
        ConfigurationError: one of the URLs is wrong.
    """
    subject = _subject_of(url)
    if small is None:
        return subject
    if not isinstance(subject, UrlSubject):
        raise ConfigurationError(f"--small {small}: the kit makes small stores of this kind itself")
    if "{capacity}" not in small:
        raise ConfigurationError(
            f"--small {without_passwords(small)}: write {{capacity}} where its size in bytes "
            "belongs, as in files:/tmp/small?capacity={capacity}"
        )
    subject.small = small
    subject.make_small(1 << 20)  # raises for a wrong URL
    return subject


def _subject_of(url: str) -> Subject:
    parsed = StoreUrl.parse(url)
    made = open_backend(url)  # raises for a wrong URL
    if isinstance(made.inner, DiskBackend):
        subject = DiskSubject(made.inner.path / "kvconnect-check" / "store")
        subject.durability = made.inner.durability
        return subject
    if parsed.scheme == "memory":
        return MemorySubject()
    if isinstance(made.inner, TieredBackend):
        return TieredSubject(_patient(url))
    if parsed.scheme == "s3":
        return UrlSubject(_forgetful(url))
    return UrlSubject(url)


def _forgetful(url: str) -> str:
    """Returns `url` without cached answers, which would hide what others have just stored."""
    return _with(_with(url, "lookup_ttl=0"), "miss_ttl=0")


def _patient(url: str) -> str:
    """Returns `url` with lookups that wait for slow tiers: a busy machine makes any tier slow."""
    return _with(url, "patience=5s")


def _with(url: str, default: str) -> str:
    name, _, _ = default.partition("=")
    return url if f"{name}=" in url else f"{url}{'&' if '?' in url else '?'}{default}"
