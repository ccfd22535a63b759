"""``disk:``: blocks in large files on a local disk, there again after a restart."""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from kvconnect.backend import Access, Backend, Capabilities, Child, StoredBlock, StoredEntry
from kvconnect.backends.disk.directory import DiskDirectory, ignore
from kvconnect.backends.disk.errors import IndexConnectionLost, IndexDamaged, IndexReadOnly
from kvconnect.backends.disk.format import INDEX_NAME
from kvconnect.backends.disk.identity import identity, replace_index, warn_damaged
from kvconnect.backends.disk.settings import DiskSettings, Durability
from kvconnect.backends.lanes import running_pools
from kvconnect.backends.url import StoreUrl, format_size
from kvconnect.errors import BackendUnavailable, ConfigurationError
from kvconnect.frame import FrameChecksum, frame_nbytes
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout

__all__ = ["DiskBackend", "from_url"]

logger = logging.getLogger("kvconnect")

T = TypeVar("T")

# Seconds after which use is written down, so that other processes drop the right blocks.
_FLUSH_S = 5.0
# Seconds between two attempts to write to a directory that could not be written to.
_RETRY_S = 5.0


class _Lane(enum.Enum):
    """What a call is about. Each lane has threads of its own.

    So a lookup does not wait for loads, nor a load, which a prompt waits for, for saves.
    """

    INDEX = "index"
    LOADS = "loads"
    SAVES = "saves"


_THREADS = {_Lane.INDEX: 1, _Lane.LOADS: 4, _Lane.SAVES: 4}


def from_url(url: StoreUrl) -> DiskBackend:
    """``disk:///var/cache/kv?capacity=200GiB&durability=power&ttl=7d``; relative: ``disk:kv``."""
    url.allow("capacity", "durability", "ttl")
    if url.location:
        raise ConfigurationError(
            f"{url}: '{url.location}' stands where a host would; "
            f"write disk:///{url.location}{url.path}, or disk:{url.location}{url.path}"
        )
    if not url.path or url.path == "/":
        raise ConfigurationError(f"{url}: a directory is needed, as in disk:///var/cache/kv")
    power = url.choice("durability", "process", "power") == "power"
    return DiskBackend(
        Path(url.path).expanduser(),
        capacity=url.size("capacity"),
        durability="power" if power else "process",
        ttl=url.duration("ttl"),
    )


class DiskBackend(Backend):
    """Blocks in slots of preallocated files, with an index in SQLite.

    The payload is written before its row is committed: a process that is killed at any moment
    leaves whole blocks or none. Several processes may share the directory, also with different
    models. What was used longest ago goes first, low priority before high, chains from their end.

    Args:
        path: the directory; made if it is not there.
        capacity: bytes of everything in it. Default: 50 GiB, or half of the space there is if that
            is less.
        durability: what a stored block survives: the ``process`` killed, or a ``power`` failure.
        ttl: seconds after which a block is dropped, used or not; ``None``: never.
    """

    capabilities = Capabilities(
        enumerable=True,
        durable=True,
        shared=True,
        expires=True,
        variable_length=True,
        seals_saves=True,
    )

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        capacity: int | None = None,
        durability: Durability = "process",
        ttl: float | None = None,
    ) -> None:
        if capacity is not None and capacity < 1:
            raise ConfigurationError(f"capacity={capacity}: must be at least one byte")
        self._settings = DiskSettings(Path(path).absolute(), capacity, durability, ttl)
        self._directory: DiskDirectory | None = None
        self._lock = threading.Lock()
        self._closed = True
        self._retry_at = 0.0
        self._flush_timer: asyncio.TimerHandle | None = None
        self._running: set[asyncio.Future[Any]] = set()
        self._threads: dict[_Lane, ThreadPoolExecutor] = {}  # while it is open
        self.at: Callable[[str], None] = ignore
        """Called on reaching a named point of a save; tests end the process there."""

    @property
    def path(self) -> Path:
        """The directory."""
        return self._settings.path

    @property
    def durability(self) -> Durability:
        """What a stored block survives."""
        return self._settings.durability

    async def open(self, layouts: Sequence[KvCacheLayout], access: Access = "store") -> None:
        """Open or make the directory, and clean up after processes that died.

        Unless it is to be a store, none is made, a running engine that has it open is not
        disturbed, and nothing is dropped for lack of room.

        Raises:
            ConfigurationError: `capacity` is below one block; the path is no directory, or its
                format is another version's.
            BackendUnavailable: it cannot be opened or made.
        """
        sizes = frozenset(frame_nbytes(layout.block_nbytes) for layout in layouts)
        largest = max(sizes, default=0)
        self._settings = replace(self._settings, frame_sizes=sizes, access=access)
        self._check_capacity(self._settings.capacity, largest)
        counts = {f"kvconnect-disk-{lane.value}": count for lane, count in _THREADS.items()}
        self._threads = dict(zip(_THREADS, running_pools(counts), strict=True))
        self._closed = False
        try:
            capacity, read_only = await self._run(
                _Lane.INDEX,
                lambda directory: (directory.capacity, directory.read_only),
                (0, True),
            )
            if not read_only:
                self._check_capacity(capacity, largest)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Wait for calls in flight, write down what was used, close everything.

        If it is cancelled, everything is closed all the same once the calls in flight have ended.
        """
        threads, self._threads = self._threads, {}
        if not threads:
            return
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        try:
            if self._running:
                await asyncio.wait(self._running)
        finally:
            closing = threads[_Lane.SAVES].submit(self._close)
            for pool in threads.values():
                pool.shutdown(wait=False)
        # Calls that were cancelled still have a thread, perhaps for as long as the disk hangs.
        for pool in threads.values():
            await asyncio.to_thread(pool.shutdown)
        closing.result()

    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        """How many leading `keys` are present; they count as used now."""
        found = await self._run(_Lane.INDEX, lambda directory: directory.lookup(keys), 0)
        self._flush_later()
        return found

    async def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        """Read blocks, neighbouring slots in one call; page-aligned buffers without a copy.

        Raises:
            BackendUnavailable: the disk failed; `into` is undefined.
        """
        loaded = await self._run(_Lane.LOADS, lambda directory: directory.load(keys, into), 0)
        self._flush_later()
        return loaded

    async def save(self, blocks: Sequence[StoredBlock]) -> int:
        """Write blocks to slots that are reserved for them, then commit them all at once.

        A disk that is full or cannot be written to stores fewer, and is warned of once.

        Raises:
            BackendUnavailable: the disk failed; none of the new blocks is stored.
        """
        return await self._save(blocks, ())

    async def save_sealed(
        self, blocks: Sequence[StoredBlock], checksums: Sequence[FrameChecksum]
    ) -> int:
        """The same; each block is sealed on the thread that writes it, while others write."""
        return await self._save(blocks, checksums)

    async def _save(self, blocks: Sequence[StoredBlock], checksums: Sequence[FrameChecksum]) -> int:
        self._retry_read_only()
        return await self._run(_Lane.SAVES, lambda directory: directory.save(blocks, checksums), 0)

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Forget `keys`; their slots are free at once."""
        await self._run(_Lane.SAVES, lambda directory: directory.delete(keys), None)

    async def children(self, key: BlockKey | None) -> Sequence[Child]:
        """The stored blocks with tokens whose parent is `key`."""
        nothing: list[Child] = []
        return await self._run(_Lane.INDEX, lambda directory: directory.children(key), nothing)

    async def scan(self) -> AsyncIterator[StoredEntry]:
        """All blocks, a page at a time; those that come or go meanwhile may be missed."""
        after = 0
        nothing: list[StoredEntry] = []
        while True:
            page = _page_after(after)
            following, entries = await self._run(_Lane.INDEX, page, (after, nothing))
            if following == after:
                return
            after = following
            for entry in entries:
                yield entry

    async def describe(self, keys: Sequence[BlockKey]) -> Sequence[StoredEntry | None]:
        """What `scan` would list of each of `keys`."""
        nothing: list[StoredEntry | None] = [None] * len(keys)
        return await self._run(_Lane.INDEX, lambda directory: directory.describe(keys), nothing)

    async def stats(self) -> Mapping[str, float]:
        """``blocks``, their ``bytes`` in slots, ``file_bytes``, ``capacity``, ``read_only``."""
        nothing: dict[str, float] = {"blocks": 0, "bytes": 0}
        return await self._run(_Lane.INDEX, lambda directory: directory.stats(), nothing)

    async def _run(self, lane: _Lane, work: Callable[[DiskDirectory], T], nothing: T) -> T:
        pool = self._threads.get(lane)
        if pool is None:
            raise self._not_open()
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(pool, self._work, work, nothing)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return await future

    def _not_open(self) -> BackendUnavailable:
        return BackendUnavailable(f"disk store {self._settings.path}: is not open")

    def _work(self, work: Callable[[DiskDirectory], T], nothing: T) -> T:
        # From here on threads of the pools.
        try:
            for _ in range(2):
                with self._opened() as directory:
                    try:
                        return work(directory)
                    except (IndexDamaged, IndexReadOnly) as error:
                        if not _damaged(self._settings.path, error):
                            raise
                        self._start_anew(directory, error)
                    except IndexConnectionLost as error:
                        logger.warning("%s; it is opened again", error)
                        directory.forget()
        except (BackendUnavailable, ConfigurationError):
            raise
        except OSError as error:
            raise BackendUnavailable(f"disk store {self._settings.path}: {error}") from error
        return nothing

    @contextmanager
    def _opened(self) -> Iterator[DiskDirectory]:
        with self._lock:
            if self._closed:  # a call that nobody waits for any more: who would close it again?
                raise self._not_open()
            if self._directory is not None and not self._directory.current:
                self._directory.retire()
                self._directory = None
            if self._directory is None:
                self._directory = self._open_directory()
            directory = self._directory
            using = directory.in_use()
            using.__enter__()
        try:
            yield directory
        finally:
            using.__exit__(None, None, None)

    def _open_directory(self) -> DiskDirectory:
        seen = identity(self._settings.path)
        try:
            return DiskDirectory(self._settings, at=self.at)
        except (IndexDamaged, IndexReadOnly) as error:
            if not _damaged(self._settings.path, error):
                raise
            self._must_be_ours(error)
            replace_index(self._settings.path, seen, error)
        try:
            return DiskDirectory(self._settings, at=self.at)
        except IndexDamaged as error:
            raise BackendUnavailable(f"disk store {self._settings.path}: {error}") from error

    def _must_be_ours(self, error: Exception) -> None:
        # Who only looks at a store does not start it anew.
        if self._settings.access != "store":
            raise BackendUnavailable(
                f"disk store {self._settings.path}: the index is damaged ({error}); an engine that "
                f"opens it starts it anew"
            ) from error

    def _start_anew(self, directory: DiskDirectory, error: Exception) -> None:
        self._must_be_ours(error)
        if directory.read_only:
            warn_damaged(self._settings.path, error)
            directory.give_up_index()
            return
        replace_index(self._settings.path, directory.identity, error)

    def _retry_read_only(self) -> None:
        directory = self._directory if self._settings.access == "store" else None
        if directory is not None and directory.read_only and time.monotonic() >= self._retry_at:
            self._retry_at = time.monotonic() + _RETRY_S
            directory.forget()

    def _flush_later(self) -> None:
        if self._flush_timer is None and self._threads:
            loop = asyncio.get_running_loop()
            self._flush_timer = loop.call_later(_FLUSH_S, self._start_flush)

    def _start_flush(self) -> None:
        self._flush_timer = None
        if self._threads:
            self._threads[_Lane.SAVES].submit(self._flush)

    def _flush(self) -> None:
        directory = self._directory
        if directory is not None:
            with directory.in_use():
                directory.flush()

    def _close(self) -> None:
        with self._lock:
            if self._threads:  # opened again, before its time came
                return
            self._closed = True
            directory, self._directory = self._directory, None
        if directory is not None:
            directory.close()

    def _check_capacity(self, capacity: int | None, largest: int) -> None:
        if capacity is not None and capacity < largest:
            raise ConfigurationError(
                f"capacity={capacity}: one block takes {largest} bytes; "
                f"give capacity={format_size(largest).replace(' ', '')} or more"
            )


def _page_after(after: int) -> Callable[[DiskDirectory], tuple[int, list[StoredEntry]]]:
    return lambda directory: directory.page(after)


def _damaged(path: Path, error: Exception) -> bool:
    # SQLite also says "read-only" of a file whose header is damaged.
    return isinstance(error, IndexDamaged) or os.access(path / INDEX_NAME, os.W_OK)
