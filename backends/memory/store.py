"""The ``memory:`` backend: blocks in host memory, the fastest store and a model for others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

from torch import Tensor

from kvconnect.backend import (
    DEFAULT_PIN_FRACTION,
    Access,
    Backend,
    Capabilities,
    Child,
    StoredBlock,
    StoredEntry,
)
from kvconnect.backends.host.blocks import HostBlocks, unit_nbytes
from kvconnect.backends.host.region import MemoryRegion
from kvconnect.backends.lanes import Lane
from kvconnect.backends.quotas import Quotas, quotas_of
from kvconnect.backends.url import StoreUrl
from kvconnect.errors import BackendUnavailable, ConfigurationError
from kvconnect.frame import FrameChecksum
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout

DEFAULT_CAPACITY = 1 << 30


def from_url(url: StoreUrl) -> MemoryBackend:
    """Parses ``memory:?capacity=4GiB&pin_fraction=0.5``."""
    url.allow("capacity", "pin_fraction", "quota")
    if url.location or url.path:
        raise ConfigurationError(f"{url}: has no place; write memory: or memory:?capacity=4GiB")
    return MemoryBackend(
        url.size("capacity") or DEFAULT_CAPACITY,
        short_values=bool(url.codec),
        pin_fraction=url.fraction("pin_fraction", DEFAULT_PIN_FRACTION),
        quotas=quotas_of(url),
    )


class MemoryBackend(Backend):
    """A store of blocks in one region of host memory, pinned where there is CUDA.

    Eviction takes the least recently used block first, low priority before high, chains from their
    end. The index belongs to the event loop. Large copies run on a thread, on held blocks.

    Args:
        capacity: bytes of the region, reserved by `open`. Page-locked memory is allocated at once,
            other memory when it is first used.
        short_values: true if values are compressed and so shorter than blocks; then memory is
            allocated in smaller units.
        pin_fraction: the share of `capacity` that pinned blocks may take, 0 to 1.
        quotas: the tenants' shares of `capacity`; ``None``: all blocks are alike.
    """

    capabilities = Capabilities(
        enumerable=True,
        inline=True,
        expires_each=True,
        pins=True,
        variable_length=True,
        hashes_loads=True,
        seals_saves=True,
    )

    def __init__(
        self,
        capacity: int = DEFAULT_CAPACITY,
        *,
        short_values: bool = False,
        pin_fraction: float = DEFAULT_PIN_FRACTION,
        quotas: Quotas | None = None,
    ) -> None:
        if capacity < 1:
            raise ConfigurationError(f"capacity={capacity}: must be at least one byte")
        self.capacity = capacity
        self._short_values = short_values
        self._pin_fraction = pin_fraction
        self._quotas = quotas
        self._blocks: HostBlocks | None = None
        self._copying: Lane | None = None

    async def open(self, layouts: Sequence[KvCacheLayout], access: Access = "store") -> None:
        """Reserves the region.

        Raises:
            ConfigurationError: `capacity` is below one block, or cannot be allocated.
        """
        unit = unit_nbytes(self.capacity, layouts, short_values=self._short_values)
        region = MemoryRegion(self.capacity, unit)
        self._copying = Lane("kvconnect-memory", 2)
        self._blocks = HostBlocks(region, self._copying, self._quotas)

    async def close(self) -> None:
        """Frees the region, as soon as copies in flight have ended."""
        copying, self._copying = self._copying, None
        self._blocks = None
        if copying is not None:
            await copying.close()
            copying.join()

    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        """Returns how many leading `keys` are present; they count as used now."""
        return self._opened().lookup(keys)

    async def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        """Copies blocks out; a block that is absent or longer than its buffer is a miss."""
        return await self._opened().load(keys, into, ())

    async def load_hashed(
        self, keys: Sequence[BlockKey], into: Sequence[Tensor], checksums: Sequence[FrameChecksum]
    ) -> int:
        """Loads like `load`; the checksums are computed as the bytes arrive."""
        return await self._opened().load(keys, into, checksums)

    async def save(self, blocks: Sequence[StoredBlock]) -> int:
        """Copies blocks in, dropping older ones for room; a block is visible once it is whole."""
        return await self._opened().save(blocks, ())

    async def save_sealed(
        self, blocks: Sequence[StoredBlock], checksums: Sequence[FrameChecksum]
    ) -> int:
        """Saves like `save`; new blocks are sealed as they are read."""
        return await self._opened().save(blocks, checksums)

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Deletes `keys`; their memory is free once no copy runs on it."""
        self._opened().delete(keys)

    async def children(self, key: BlockKey | None) -> Sequence[Child]:
        """Returns the stored blocks with tokens whose parent is `key`."""
        return self._opened().children(key)

    async def scan(self) -> AsyncIterator[StoredEntry]:
        """Yields all blocks that were there when it began."""
        for entry in self._opened().entries():
            yield entry

    async def describe(self, keys: Sequence[BlockKey]) -> Sequence[StoredEntry | None]:
        """Returns the entry that `scan` would yield for each of `keys`."""
        return self._opened().describe(keys)

    async def scrub(self) -> bool:
        """Overwrites memory that blocks have left, 16 MiB at a time; see `Backend.scrub`."""
        return self._opened().scrub()

    async def pin(self, keys: Sequence[BlockKey], until: float | None) -> Sequence[bool]:
        """Pins or unpins `keys`; see `Backend.pin`."""
        return self._opened().pin(keys, until, int(self._pin_fraction * self.capacity))

    async def stats(self) -> Mapping[str, float]:
        """Returns the numbers of blocks and of pinned blocks, their bytes, and ``capacity``."""
        blocks = self._opened()
        pinned, pinned_nbytes = blocks.pinned()
        return {
            "blocks": len(blocks),
            "bytes": blocks.nbytes,
            "capacity": self.capacity,
            "pinned_blocks": pinned,
            "pinned_bytes": pinned_nbytes,
        }

    def _opened(self) -> HostBlocks:
        if self._blocks is None:
            raise BackendUnavailable("memory store: is not open")
        return self._blocks
