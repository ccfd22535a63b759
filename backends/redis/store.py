"""``redis://``, ``rediss://``, ``redis+sentinel://``, ``redis+cluster://``: a shared store.

Redis 6.2 or newer, and Valkey. Capacity is the server's own: give it ``maxmemory`` and the policy
``allkeys-lru``, and what was used longest ago makes room; with ``noeviction`` it stores nothing
more once it is full.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from torch import Tensor

from kvconnect.backend import Access, Backend, Capabilities, Child, StoredBlock, StoredEntry
from kvconnect.backends.redis.children import ChildIndex
from kvconnect.backends.redis.find import RedisBlocks, describe
from kvconnect.backends.redis.format import Names
from kvconnect.backends.redis.load import RedisReader
from kvconnect.backends.redis.router import RedisRouter
from kvconnect.backends.redis.save import RedisWriter
from kvconnect.backends.redis.server import check_server, scan_page, survey
from kvconnect.backends.redis.settings import RedisSettings
from kvconnect.backends.url import StoreUrl
from kvconnect.errors import BackendUnavailable
from kvconnect.frame import FrameChecksum
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout

__all__ = ["RedisBackend", "from_url"]

T = TypeVar("T")


def from_url(url: StoreUrl) -> RedisBackend:
    """``redis://user:password@host:6379/0?ttl=7d&prefix=kv:``, and its other schemes."""
    return RedisBackend(RedisSettings.parse(url))


class RedisBackend(Backend):
    """Blocks in a Redis or Valkey server, its failover group or its cluster.

    Values move on threads, between the socket and the caller's buffers without a copy. A call ends
    only when nothing can touch its buffers any more; a connection on which anything went wrong is
    closed, so that no answer is ever taken for another one's.
    """

    capabilities = Capabilities(
        enumerable=True,
        shared=True,
        expires=True,
        variable_length=True,
        hashes_loads=True,
        seals_saves=True,
    )

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        self._names = Names(settings.prefix.encode())
        self._probe = settings.prefix.encode() + b"probe"
        self._router: RedisRouter | None = None
        self._blocks: RedisBlocks | None = None
        self._reader: RedisReader | None = None
        self._writer: RedisWriter | None = None
        self._index: ChildIndex | None = None

    async def open(self, layouts: Sequence[KvCacheLayout], access: Access = "store") -> None:
        """Find the servers, and see whether each of them takes what it will be asked.

        Raises:
            ConfigurationError: credentials, database, TLS, kind of server or rights are wrong.
            BackendUnavailable: a server cannot be reached, or does not serve now.
        """
        settings, probe = self._settings, self._probe
        router = RedisRouter(settings)
        try:
            await router.open()
            await router.everywhere(partial(check_server, settings, probe))
        except BaseException:
            await router.close()
            raise
        router.opened()
        self._router = router
        self._blocks = RedisBlocks(router, self._names)
        self._reader = RedisReader(router, self._blocks)
        self._writer = RedisWriter(router, self._blocks, probe, settings.ttl)
        self._index = ChildIndex(router, self._blocks, settings.ttl)

    async def close(self) -> None:
        """End all connections; what is in flight fails, and has ended when this returns."""
        router, self._router = self._router, None
        self._blocks = self._reader = self._writer = self._index = None
        if router is not None:
            await router.close()

    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        """How many leading `keys` are wholly there; they count as used now."""
        return len(await _opened(self._blocks).leading(keys))

    async def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        """Fill the beginnings of `into`; damaged blocks are dropped.

        Raises:
            BackendUnavailable: `into` is undefined, and nothing touches it any more.
        """
        return await _opened(self._reader).load(keys, into, ())

    async def load_hashed(
        self, keys: Sequence[BlockKey], into: Sequence[Tensor], checksums: Sequence[FrameChecksum]
    ) -> int:
        """The same; checksums are taken as the bytes arrive, of what fits one value."""
        return await _opened(self._reader).load(keys, into, checksums)

    async def save(self, blocks: Sequence[StoredBlock]) -> int:
        """Store those that are not there yet; fewer if a server takes no writes now.

        Raises:
            BackendUnavailable: each block is wholly stored or not at all.
        """
        return await self._save(blocks, ())

    async def save_sealed(
        self, blocks: Sequence[StoredBlock], checksums: Sequence[FrameChecksum]
    ) -> int:
        """The same; what is sent is sealed on the thread that sends it."""
        return await self._save(blocks, checksums)

    async def _save(self, blocks: Sequence[StoredBlock], checksums: Sequence[FrameChecksum]) -> int:
        writer, index = _opened(self._writer), _opened(self._index)
        if all(block.tokens is None for block in blocks):
            return await writer.save(blocks, checksums)
        saved, listed = await asyncio.gather(
            writer.save(blocks, checksums), index.add(blocks), return_exceptions=True
        )
        for result in (saved, listed):
            if isinstance(result, BaseException):
                raise result
        return saved  # type: ignore[return-value]

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Forget `keys`."""
        await _opened(self._blocks).delete(keys)

    async def children(self, key: BlockKey | None) -> Sequence[Child]:
        """The newest blocks with tokens whose parent is `key`."""
        return await _opened(self._index).children(key)

    async def scan(self) -> AsyncIterator[StoredEntry]:
        """All blocks, a page at a time; those that come or go meanwhile may be missed."""
        router = _opened(self._router)
        await router.refresh()
        seen: set[BlockKey] = set()  # servers may list a key twice
        for server in router.servers:
            cursor = 0
            while True:
                page = await router.on(server, partial(scan_page, self._names, cursor))
                keys = [key for key in page.keys if key not in seen]
                seen.update(keys)
                for entry in await self.describe(keys):
                    if entry is not None:
                        yield entry
                cursor = page.cursor
                if not cursor:
                    break

    async def describe(self, keys: Sequence[BlockKey]) -> Sequence[StoredEntry | None]:
        """What `scan` lists of each of `keys`.

        Servers older than Redis 7.2 count it as use, those under an LFU policy do not tell of use.
        """
        return await describe(_opened(self._router), self._names, keys)

    async def stats(self) -> Mapping[str, float]:
        """``blocks`` and their ``bytes``, estimated where there are very many.

        And for all that the servers hold: ``used_memory`` and, where limited, ``maxmemory``.
        """
        router = _opened(self._router)
        await router.refresh()
        surveys = await router.everywhere(partial(survey, self._names))
        numbers: dict[str, float] = {
            "blocks": sum(one.blocks for one in surveys),
            "bytes": sum(one.nbytes for one in surveys),
            "used_memory": sum(one.used for one in surveys),
        }
        if all(one.limit for one in surveys):
            numbers["maxmemory"] = sum(one.limit for one in surveys)
        return numbers


def _opened(part: T | None) -> T:
    if part is None:
        raise BackendUnavailable("Redis store: is not open")
    return part
