"""The ``disk:`` backend: blocks in large files on a local disk, kept across restarts."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvconnect.backend import (
    DEFAULT_PIN_FRACTION,
    Access,
    Backend,
    Capabilities,
    Child,
    StoredBlock,
    StoredEntry,
)
from kvconnect.backends.disk.client import DiskClient, not_open
from kvconnect.backends.disk.directory import DiskDirectory, ignore
from kvconnect.backends.disk.load import load
from kvconnect.backends.disk.save import save
from kvconnect.backends.disk.settings import DiskSettings, Durability
from kvconnect.backends.quotas import Quotas, quotas_of
from kvconnect.backends.url import StoreUrl, format_size
from kvconnect.errors import ConfigurationError
from kvconnect.frame import FrameChecksum, frame_nbytes
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout

if TYPE_CHECKING:
    from torch import Tensor


def from_url(url: StoreUrl) -> DiskBackend:
    """Parses ``disk:///var/cache/kv?capacity=200GiB&durability=power&ttl=7d`` or ``disk:kv``."""
    url.allow("capacity", "durability", "pin_fraction", "quota", "ttl")
    if url.location:
        shown = str(replace(url, query={})).partition("//")[2]
        raise ConfigurationError(
            f"{url}: '{shown.partition('/')[0]}' stands where a host would; "
            f"write disk:///{shown}, or disk:{shown}"
        )
    if not url.path or url.path == "/":
        raise ConfigurationError(f"{url}: a directory is needed, as in disk:///var/cache/kv")
    power = url.choice("durability", "process", "power") == "power"
    return DiskBackend(
        Path(url.path).expanduser(),
        capacity=url.size("capacity"),
        durability="power" if power else "process",
        ttl=url.duration("ttl"),
        pin_fraction=url.fraction("pin_fraction", DEFAULT_PIN_FRACTION),
        quotas=quotas_of(url),
    )


class DiskBackend(Backend):
    """A store of blocks in slots of preallocated files, with an index in SQLite.

    The payload is written before its row is committed: a process that is killed at any moment
    leaves whole blocks or none. Several processes may share the directory, also with different
    models. Eviction takes the least recently used block first, low priority before high, chains
    from their end.

    Args:
        path: the directory; made if it does not exist.
        capacity: bytes of all files in the directory. Default: 50 GiB, or half of the free space if
            that is less.
        durability: the event that stored blocks survive: ``process`` (it is killed), or ``power``
            (a failure).
        ttl: seconds after its save at which a block is dropped, even if it is used; ``None``:
            never.
        pin_fraction: the share of `capacity` that pinned blocks may take, 0 to 1.
        quotas: the tenants' shares of `capacity`; ``None``: all blocks are alike.
    """

    capabilities = Capabilities(
        enumerable=True,
        durable=True,
        shared=True,
        expires=True,
        expires_each=True,
        pins=True,
        variable_length=True,
        hashes_loads=True,
        seals_saves=True,
    )

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        capacity: int | None = None,
        durability: Durability = "process",
        ttl: float | None = None,
        pin_fraction: float = DEFAULT_PIN_FRACTION,
        quotas: Quotas | None = None,
    ) -> None:
        if capacity is not None and capacity < 1:
            raise ConfigurationError(f"capacity={capacity}: must be at least one byte")
        self._settings = DiskSettings(
            Path(path).absolute(), capacity, durability, ttl, pin_fraction, quotas=quotas
        )
        self._client: DiskClient | None = None  # while it is open
        self.at: Callable[[str], None] = ignore
        """The function called at each named point of a save; tests end the process there."""

    @property
    def path(self) -> Path:
        """The directory."""
        return self._settings.path

    @property
    def durability(self) -> Durability:
        """The event that a stored block survives."""
        return self._settings.durability

    async def open(self, layouts: Sequence[KvCacheLayout], access: Access = "store") -> None:
        """Opens or makes the directory, and cleans up after processes that died.

        With another `access` than ``store``, no directory is made, engines that use it are not
        disturbed, and no block is dropped for lack of space.

        Raises:
            ConfigurationError: `capacity` is below one block; the path is no directory, or its
                format is another version's.
            BackendUnavailable: the directory cannot be opened or made.
        """
        sizes = frozenset(frame_nbytes(layout.block_nbytes) for layout in layouts)
        largest = max(sizes, default=0)
        self._settings = replace(self._settings, frame_sizes=sizes, access=access)
        self._check_capacity(self._settings.capacity, largest)
        client = DiskClient(self._settings, self.at)
        try:
            capacity, read_only = await client.run(
                "index", lambda directory: (directory.capacity, directory.read_only)
            )
            if not read_only:
                self._check_capacity(capacity, largest)
        except BaseException:
            await client.close()
            raise
        self._client = client

    async def close(self) -> None:
        """Waits for calls in flight, writes the times of use to the index, closes everything.

        If the caller is cancelled, everything is closed nevertheless once those calls have ended.
        """
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        """Returns how many leading `keys` are present; they count as used now."""
        return await self._opened().run("index", lambda directory: directory.lookup(keys))

    async def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        """Reads blocks, neighbouring slots in one call; page-aligned buffers without a copy.

        Raises:
            BackendUnavailable: the disk failed; `into` is undefined.
        """
        return await self.load_hashed(keys, into, ())

    async def load_hashed(
        self, keys: Sequence[BlockKey], into: Sequence[Tensor], checksums: Sequence[FrameChecksum]
    ) -> int:
        """Loads like `load`; the thread that has read a block hashes it while others read."""
        work = partial(load, keys=keys, into=into, checksums=checksums)
        return await self._opened().run("loads", work)

    async def save(self, blocks: Sequence[StoredBlock]) -> int:
        """Writes blocks to slots that are reserved for them, then commits them all at once.

        If the disk is full or cannot be written to, fewer are stored, with one warning.

        Raises:
            BackendUnavailable: the disk failed; none of the new blocks is stored.
        """
        return await self.save_sealed(blocks, ())

    async def save_sealed(
        self, blocks: Sequence[StoredBlock], checksums: Sequence[FrameChecksum]
    ) -> int:
        """Saves like `save`; the thread that writes a block seals it while others write."""
        client = self._opened()
        client.retry_read_only()
        return await client.run("saves", partial(save, blocks=blocks, checksums=checksums))

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Deletes `keys`; their slots are free at once."""
        await self._opened().run("saves", lambda directory: directory.delete(keys))

    async def children(self, key: BlockKey | None) -> Sequence[Child]:
        """Returns the stored blocks with tokens whose parent is `key`."""
        return await self._opened().run("index", lambda directory: directory.children(key))

    async def scan(self) -> AsyncIterator[StoredEntry]:
        """Yields all blocks, a page at a time; may miss those added or removed meanwhile."""
        after = 0
        while True:
            page = partial(DiskDirectory.page, after=after)
            following, entries = await self._opened().run("index", page)
            if following == after:
                return
            after = following
            for entry in entries:
                yield entry

    async def describe(self, keys: Sequence[BlockKey]) -> Sequence[StoredEntry | None]:
        """Returns the entry that `scan` would yield for each of `keys`."""
        return await self._opened().run("index", lambda directory: directory.reader.describe(keys))

    async def scrub(self) -> bool:
        """Overwrites free slots and unused ends of slots, 16 MiB at a time; see `Backend.scrub`.

        Raises:
            BackendUnavailable: the directory cannot be written to.
        """
        return await self._opened().run("saves", lambda directory: directory.scrub())

    async def pin(self, keys: Sequence[BlockKey], until: float | None) -> Sequence[bool]:
        """Pins or unpins `keys`, for all processes and across restarts; see `Backend.pin`.

        A store opened for maintenance without a capacity applies the share to the default capacity.

        Raises:
            BackendUnavailable: the directory cannot be written to.
        """
        return await self._opened().run("saves", lambda directory: directory.pin(keys, until))

    async def stats(self) -> Mapping[str, float]:
        """Returns ``blocks``, ``bytes`` (in slots), ``file_bytes``, ``capacity``, ``read_only``.

        And ``pinned_blocks`` and ``pinned_bytes``.
        """
        return await self._opened().run("index", lambda directory: directory.stats())

    def _opened(self) -> DiskClient:
        if self._client is None:
            raise not_open(self._settings)
        return self._client

    def _check_capacity(self, capacity: int | None, largest: int) -> None:
        if capacity is not None and capacity < largest:
            raise ConfigurationError(
                f"capacity={capacity}: one block takes {largest} bytes; "
                f"give capacity={format_size(largest).replace(' ', '')} or more"
            )
