"""The ``nixl://`` backend: blocks that this instance saved and those of its peers, as one store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvconnect.backend import Access, Backend, Capabilities, Child, StoredBlock, StoredEntry
from kvconnect.backends.host.blocks import HostBlocks, unit_nbytes
from kvconnect.backends.host.region import MemoryRegion
from kvconnect.backends.lanes import Lanes
from kvconnect.backends.nixl.fetch import Fetcher
from kvconnect.backends.nixl.find import NixlFinder
from kvconnect.backends.nixl.node import NixlNode
from kvconnect.backends.nixl.settings import NixlSettings
from kvconnect.backends.nixl.staging import Staging
from kvconnect.backends.url import StoreUrl
from kvconnect.errors import BackendUnavailable
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout
from kvconnect.transfer.peers import PeerLink

if TYPE_CHECKING:
    from torch import Tensor


def from_url(url: StoreUrl) -> NixlBackend:
    """Parses ``nixl://host:port,host:port?listen=host:port&capacity=4GiB``."""
    return NixlBackend(NixlSettings.from_url(url), short_values=bool(url.codec))


@dataclass(frozen=True, slots=True)
class _Parts:
    lanes: Lanes
    blocks: HostBlocks
    node: NixlNode
    finder: NixlFinder
    fetcher: Fetcher


class NixlBackend(Backend):
    """A store of blocks in the memory of several instances, which read each other's by key.

    Saved blocks are copied into a bounded region of this process and published: peers find and read
    them, one-sided, with NIXL or over TCP. Blocks live as long as the instance that saved them. A
    peer that dies, freezes, restarts or reports wrong digests costs time, nothing else.

    Args:
        settings: the parameters of the URL.
        short_values: see `MemoryBackend`.
    """

    capabilities = Capabilities(enumerable=True, expires_each=True, variable_length=True)

    def __init__(self, settings: NixlSettings, *, short_values: bool = False) -> None:
        self.settings = settings
        self._short_values = short_values
        self._parts: _Parts | None = None
        self._regions: list[Tensor] = []

    async def open(self, layouts: Sequence[KvCacheLayout], access: Access = "store") -> None:
        """Reserves memory, listens and connects to the peers.

        A store opened to read or to maintain publishes no block and does not listen.

        Raises:
            ConfigurationError: `capacity` is below one block, the port is taken, a peer has another
                secret, transport or version, NIXL cannot be used, or the directory refuses.
            BackendUnavailable: the directory cannot be reached.
        """
        settings = self.settings
        unit = unit_nbytes(settings.capacity, layouts, short_values=self._short_values)
        region = MemoryRegion(settings.capacity, unit)
        staging = Staging(settings.staging)
        lanes = Lanes("kvconnect-nixl", "nixl store", copy=2, control=1)
        blocks = HostBlocks(region, lanes["copy"])
        try:
            node = NixlNode(settings, blocks, staging)
            try:
                await lanes["control"].run(lambda: self._open_node(node, access))
            except BaseException:
                await lanes["control"].run(node.close)
                raise
        except BaseException:
            await lanes.close()
            raise
        fetcher = Fetcher(node, staging, lanes, settings)
        finder = NixlFinder(blocks, node.peers, settings.patience_s)
        self._parts = _Parts(lanes, blocks, node, finder, fetcher)

    def _open_node(self, node: NixlNode, access: Access) -> None:
        node.open(publish=access == "store")
        for region in self._regions:
            node.register(region)

    async def close(self) -> None:
        """Ends all connections; calls in flight fail, and have ended when this returns."""
        parts, self._parts = self._parts, None
        if parts is None:
            return
        await asyncio.to_thread(parts.node.close)
        await parts.lanes.close()
        parts.lanes.join()

    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        """Returns how many leading `keys` are here or at a peer that answers in time."""
        return await self._opened().finder.lookup(keys)

    async def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        """Fills `into` from this instance and from peers; a block lost on the way is a miss."""
        parts, loaded = self._opened(), 0
        failed: set[PeerLink] = set()
        while loaded < len(keys):
            loaded += await parts.blocks.load(keys[loaded:], into[loaded:], ())
            rest = keys[loaded:]
            if not rest or parts.blocks.present(rest[:1])[0]:
                break  # all is there, or the next is longer than its buffer
            link, known = await parts.finder.run_of(rest, failed)
            if link is None:
                break
            got = await parts.fetcher.fetch(link, rest[:known], into[loaded : loaded + known])
            loaded += got
            if got < known:
                failed.add(link)
                parts.finder.forget(rest[got:known])
        return loaded

    async def save(self, blocks: Sequence[StoredBlock]) -> int:
        """Publishes copies of `blocks`; drops older blocks for room, except leased ones."""
        return await self._opened().blocks.save(blocks, ())

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Deletes `keys` here and at peers that answer in time; others may keep them."""
        parts = self._opened()
        parts.blocks.delete(keys)
        await parts.finder.forget_everywhere(keys)

    async def children(self, key: BlockKey | None) -> Sequence[Child]:
        """Returns blocks with tokens whose parent is `key`, here and at peers that answer soon."""
        return await self._opened().finder.children(key)

    async def scan(self) -> AsyncIterator[StoredEntry]:
        """Yields the blocks that this instance published and still has."""
        for entry in self._opened().blocks.entries():
            yield entry

    async def describe(self, keys: Sequence[BlockKey]) -> Sequence[StoredEntry | None]:
        """Returns the entry that `scan` would yield for each of `keys`, or ``None``."""
        return self._opened().blocks.describe(keys)

    async def stats(self) -> Mapping[str, float]:
        """Returns ``blocks``, ``bytes``, ``capacity``, ``peers`` and the peers' ``leases``."""
        parts = self._opened()
        return {
            "blocks": len(parts.blocks),
            "bytes": parts.blocks.nbytes,
            "capacity": self.settings.capacity,
            "peers": parts.node.peers.connected,
            "leases": parts.node.leases,
        }

    def register(self, region: Tensor) -> None:
        """Registers `region`, so that blocks of peers arrive in it without a copy."""
        self._regions.append(region)
        if self._parts is not None:
            self._parts.node.register(region)

    @property
    def address(self) -> str:
        """The ``host:port`` where peers reach this instance; empty if it does not listen."""
        return self._opened().node.address

    def _opened(self) -> _Parts:
        if self._parts is None:
            raise BackendUnavailable("nixl store: is not open")
        return self._parts
