"""The ``s3:`` backend: blocks in a bucket of any S3-compatible service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvconnect.backend import Access, Backend, Capabilities, Child, StoredBlock, StoredEntry
from kvconnect.backends.lanes import Lanes
from kvconnect.backends.s3.bucket import S3Bucket
from kvconnect.backends.s3.children import S3Children
from kvconnect.backends.s3.find import S3Finder, S3Listing
from kvconnect.backends.s3.load import S3Reader
from kvconnect.backends.s3.save import S3Writer
from kvconnect.backends.s3.settings import S3Settings
from kvconnect.backends.url import StoreUrl
from kvconnect.errors import BackendUnavailable
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout

if TYPE_CHECKING:
    from torch import Tensor

_WATCH_S = 1.0


def from_url(url: StoreUrl) -> S3Backend:
    """Parses ``s3://bucket/prefix?endpoint_url=https://minio:9000&blocks_per_object=8``."""
    return S3Backend(S3Settings.from_url(url))


class S3Backend(Backend):
    """A store of blocks in objects of a bucket, several to an object, found without listing it.

    Several processes may use one bucket and prefix, also with different models. The store evicts no
    block: a lifecycle rule on the prefix removes old objects, and `ttl` limits the age of found
    blocks. Answers about blocks are cached for ``lookup_ttl`` and ``miss_ttl`` seconds, after which
    other processes notice that a block was saved or deleted.

    Args:
        settings: the store's settings.
    """

    capabilities = Capabilities(
        enumerable=True,
        durable=True,
        shared=True,
        expires=True,
        expires_each=True,
        variable_length=True,
    )

    def __init__(self, settings: S3Settings) -> None:
        self.settings = settings
        self._parts: _Parts | None = None
        self._watch: asyncio.TimerHandle | None = None

    async def open(self, layouts: Sequence[KvCacheLayout], access: Access = "store") -> None:
        """Connects, and checks that the bucket exists and may be read.

        Raises:
            ConfigurationError: no such bucket, no credentials, or they are refused.
            BackendUnavailable: the service cannot be reached, or fails.
        """
        settings = self.settings
        # Lookups do not wait for loads and saves.
        threads = settings.concurrency
        lanes = Lanes("kvconnect-s3", "s3 store", requests=threads, transfers=threads)
        try:
            bucket = await lanes["requests"].run(partial(S3Bucket, settings))
        except BaseException:
            await lanes.close()
            raise
        self._parts = _Parts(bucket, lanes)
        self._watch_requests()
        try:
            await lanes["requests"].run(bucket.check)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Ends requests in flight with an error, and closes all connections."""
        parts, self._parts = self._parts, None
        if self._watch is not None:
            self._watch.cancel()
        if parts is None:
            return
        parts.bucket.close()
        await parts.lanes.close()

    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        """Returns how many leading `keys` are present, or were when the answer was cached.

        Raises:
            BackendUnavailable: a request failed.
        """
        return len(await self._opened().finder.leading(keys))

    async def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        """Reads blocks straight into `into`, neighbours in one request.

        Raises:
            BackendUnavailable: `into` is undefined, and gets no more writes.
        """
        return await self._opened().reader.load(keys, into)

    async def save(self, blocks: Sequence[StoredBlock]) -> int:
        """Writes blocks, neighbours into one object.

        Raises:
            BackendUnavailable: a request failed; each block is stored wholly or not at all.
        """
        return await self._opened().writer.save(blocks)

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Deletes `keys`; their bytes are removed with the last block that shares their object.

        Raises:
            BackendUnavailable: a request failed; some blocks may be deleted, others not.
        """
        await self._opened().writer.delete(keys)

    async def children(self, key: BlockKey | None) -> Sequence[Child]:
        """Returns stored blocks with tokens whose parent is `key`, with two requests at most."""
        parts = self._opened()
        listed = await parts.children.get(key)
        own = [] if key is None else await parts.finder.children(key)
        keys = {child.key for child in listed}
        return [*(child for child in own if child.key not in keys), *listed]

    async def scan(self) -> AsyncIterator[StoredEntry]:
        """Yields all blocks. Lists the bucket, and reads a small object for each few of them."""
        async for entries in self._opened().listing.entries():
            for entry in entries:
                yield entry

    async def describe(self, keys: Sequence[BlockKey]) -> Sequence[StoredEntry | None]:
        """Returns the entries of `keys`; those of cached blocks without another request.

        The times of writing are those of the writers' clocks.

        Raises:
            BackendUnavailable: a request failed.
        """
        return await self._opened().finder.describe(keys)

    async def stats(self) -> Mapping[str, float]:
        """Returns ``blocks`` and ``bytes``, unless too many to list, and ``remembered`` answers."""
        parts = self._opened()
        numbers = await parts.listing.totals()
        return {**numbers, "remembered": len(parts.finder)}

    def _opened(self) -> _Parts:
        if self._parts is None:
            raise BackendUnavailable(f"{self.settings}: is not open")
        return self._parts

    def _watch_requests(self) -> None:
        parts = self._parts
        if parts is not None:
            parts.bucket.end_overdue()
            loop = asyncio.get_running_loop()
            self._watch = loop.call_later(_WATCH_S, self._watch_requests)


class _Parts:
    """The objects of an open store."""

    def __init__(self, bucket: S3Bucket, lanes: Lanes) -> None:
        self.bucket = bucket
        self.lanes = lanes
        self.finder = finder = S3Finder(bucket, lanes)
        self.children = children = S3Children(bucket, lanes)
        self.reader = S3Reader(bucket, lanes, finder)
        self.writer = S3Writer(bucket, lanes, finder, children)
        self.listing = S3Listing(bucket, lanes)
