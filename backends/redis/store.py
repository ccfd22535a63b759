"""The Redis backend: ``redis://``, ``rediss://``, ``redis+sentinel://``, ``redis+cluster://``.

Redis 6.2 or newer, and Valkey. Capacity is the server's own: give it ``maxmemory`` and the policy
``allkeys-lru``, and it evicts the least recently used blocks; with ``noeviction`` it stores nothing
more once it is full. Pins need ``noeviction``, or ``volatile-lru`` and blocks with a ``ttl``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvconnect.backend import Access, Backend, Capabilities, Child, StoredBlock, StoredEntry
from kvconnect.backends.redis.find import RedisChildren, RedisFinder
from kvconnect.backends.redis.leftovers import RedisLeftovers
from kvconnect.backends.redis.load import load
from kvconnect.backends.redis.pins import RedisPins
from kvconnect.backends.redis.router import RedisRouter
from kvconnect.backends.redis.save import RedisWriter
from kvconnect.backends.redis.settings import RedisSettings
from kvconnect.backends.url import StoreUrl
from kvconnect.errors import BackendUnavailable
from kvconnect.frame import FrameChecksum
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout

if TYPE_CHECKING:
    from torch import Tensor


def from_url(url: StoreUrl) -> RedisBackend:
    """Parses ``redis://user:password@host:6379/0?ttl=7d&prefix=kv:``, and the other schemes."""
    return RedisBackend(RedisSettings.from_url(url))


@dataclass(frozen=True, slots=True)
class _Parts:
    router: RedisRouter
    finder: RedisFinder
    children: RedisChildren
    writer: RedisWriter
    leftovers: RedisLeftovers
    pins: RedisPins


class RedisBackend(Backend):
    """A store of blocks in a Redis or Valkey server, its failover group or its cluster.

    Values move on threads, between the socket and the caller's buffers without a copy. A call ends
    only when no thread uses its buffers any more. After any error the connection is closed, so that
    no answer is mistaken for that of another command.
    """

    capabilities = Capabilities(
        enumerable=True,
        shared=True,
        expires=True,
        expires_each=True,
        pins=True,
        variable_length=True,
        hashes_loads=True,
        seals_saves=True,
    )

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        self._parts: _Parts | None = None

    async def open(self, layouts: Sequence[KvCacheLayout], access: Access = "store") -> None:
        """Finds the servers, and checks that each of them accepts the commands of this store.

        Raises:
            ConfigurationError: credentials, database, TLS, kind of server or rights are wrong.
            BackendUnavailable: a server cannot be reached, or does not serve now.
        """
        router = RedisRouter(self._settings)
        await router.open()
        finder = RedisFinder(router)
        children = RedisChildren(router, finder)
        self._parts = _Parts(
            router,
            finder,
            children,
            RedisWriter(router, finder, children),
            RedisLeftovers(router),
            RedisPins(router, finder),
        )

    async def close(self) -> None:
        """Ends all connections; calls in flight fail, and have ended when this returns."""
        parts, self._parts = self._parts, None
        if parts is not None:
            await parts.router.close()

    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        """Returns how many leading `keys` are complete, and marks them as used."""
        return len(await self._opened().finder.leading(keys))

    async def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        """Fills the beginnings of `into`; damaged blocks are deleted.

        Raises:
            BackendUnavailable: `into` is undefined, and gets no more writes.
        """
        return await self.load_hashed(keys, into, ())

    async def load_hashed(
        self, keys: Sequence[BlockKey], into: Sequence[Tensor], checksums: Sequence[FrameChecksum]
    ) -> int:
        """Loads like `load`; computes the checksum of a frame's first value as its bytes arrive."""
        parts = self._opened()
        return await load(parts.router, parts.finder, keys, into, checksums)

    async def save(self, blocks: Sequence[StoredBlock]) -> int:
        """Stores new blocks; returns fewer if a server accepts no writes now.

        Raises:
            BackendUnavailable: each block is wholly stored or not at all.
        """
        return await self.save_sealed(blocks, ())

    async def save_sealed(
        self, blocks: Sequence[StoredBlock], checksums: Sequence[FrameChecksum]
    ) -> int:
        """Saves like `save`; the thread that sends a frame seals it."""
        opened = self._opened()
        await opened.pins.end_outlived([block.key for block in blocks])
        saved = await opened.writer.save(blocks, checksums)
        await opened.pins.sweep_when_due()
        return saved

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Deletes `keys`, and before them their tokens in the indexes of children."""
        opened = self._opened()
        await opened.children.remove(keys)
        await opened.finder.delete(keys)

    async def children(self, key: BlockKey | None) -> Sequence[Child]:
        """Returns the newest blocks with tokens whose parent is `key`."""
        return await self._opened().children.get(key)

    async def scan(self) -> AsyncIterator[StoredEntry]:
        """Lists all blocks, a page at a time; may miss those added or removed meanwhile."""
        async for entry in self._opened().finder.scan():
            yield entry

    async def describe(self, keys: Sequence[BlockKey]) -> Sequence[StoredEntry | None]:
        """Returns the entry that `scan` would list for each of `keys`.

        Counts as use with servers older than Redis 7.2. An LFU policy hides the time of use.
        """
        return await self._opened().finder.describe(keys)

    async def pin(self, keys: Sequence[BlockKey], until: float | None) -> Sequence[bool]:
        """Pins or unpins `keys`, for all processes; see `Backend.pin`.

        A pinned block has no expiry in the server. If its own expiry has passed, it is not found
        from the end of its pin on; its bytes are freed within a minute if any process saves. In a
        cluster it is found until then. The share of pinned blocks is one of all ``maxmemory``;
        without that there is no limit. Pins last as long as the server's data.

        Raises:
            ConfigurationError: a server may drop pinned blocks: it has ``maxmemory`` and a policy
                ``allkeys-…``, or does not say.
            BackendUnavailable: a server fails; some of `keys` may be pinned.
        """
        return await self._opened().pins.pin(keys, until)

    async def scrub(self) -> bool:
        """Removes tokens of absent blocks from lists of children, and parts without a head.

        Each call cleans a page of names; see `Backend.scrub`.
        """
        return await self._opened().leftovers.remove_some()

    async def stats(self) -> Mapping[str, float]:
        """Returns ``blocks`` and their ``bytes``, estimated where there are very many.

        Also ``pinned_blocks`` and ``pinned_bytes``, and of all that the servers hold:
        ``used_memory`` and, where limited, ``maxmemory``.
        """
        opened = self._opened()
        return await opened.finder.totals() | await opened.pins.totals()

    def _opened(self) -> _Parts:
        if self._parts is None:
            raise BackendUnavailable("Redis store: is not open")
        return self._parts
