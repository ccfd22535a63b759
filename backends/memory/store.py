"""``memory:``: blocks in host memory, the fastest store and the model for the others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvconnect.backend import Access, Backend, Capabilities, Child, StoredBlock, StoredEntry
from kvconnect.backends.lanes import Lane
from kvconnect.backends.memory.copier import Copy, copy_all
from kvconnect.backends.memory.index import MemoryBlock, MemoryIndex
from kvconnect.backends.memory.region import MemoryRegion
from kvconnect.backends.url import StoreUrl, format_size
from kvconnect.errors import BackendUnavailable, ConfigurationError
from kvconnect.frame import ALIGNMENT, FrameChecksum, frame_nbytes
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout

__all__ = ["MemoryBackend", "from_url"]

DEFAULT_CAPACITY = 1 << 30
# One layout: a block is one unit, one copy. Several: blocks of any size share units without waste.
_SHARED_UNIT = 64 << 10
# Of a block, where values are shorter than blocks.
_PARTS = 16


def from_url(url: StoreUrl) -> MemoryBackend:
    """``memory:?capacity=4GiB``."""
    url.allow("capacity")
    if url.location or url.path:
        raise ConfigurationError(f"{url}: has no place; write memory: or memory:?capacity=4GiB")
    return MemoryBackend(url.size("capacity") or DEFAULT_CAPACITY, short_values=bool(url.codec))


class MemoryBackend(Backend):
    """Blocks in one region of host memory, pinned where there is CUDA.

    What was used longest ago goes first, of low priority before high, chains from their end. The
    index belongs to the event loop; large copies run on a thread, on blocks held meanwhile.

    Args:
        capacity: bytes of the region. It is reserved at `open` (pinned memory is taken at once,
            other memory as it is used).
        short_values: values will be shorter than the layouts say, because they are compressed; then
            memory is handed out in smaller units.
    """

    capabilities = Capabilities(
        enumerable=True, inline=True, variable_length=True, hashes_loads=True, seals_saves=True
    )

    def __init__(self, capacity: int = DEFAULT_CAPACITY, *, short_values: bool = False) -> None:
        if capacity < 1:
            raise ConfigurationError(f"capacity={capacity}: must be at least one byte")
        self.capacity = capacity
        self._short_values = short_values
        self._index: MemoryIndex | None = None
        self._region: MemoryRegion | None = None
        self._copying: Lane | None = None

    async def open(self, layouts: Sequence[KvCacheLayout], access: Access = "store") -> None:
        """Reserve the region.

        Raises:
            ConfigurationError: `capacity` is below one block, or there is not so much memory.
        """
        frames = {frame_nbytes(layout.block_nbytes) for layout in layouts}
        largest = max(frames, default=0)
        if self.capacity < largest:
            raise ConfigurationError(
                f"capacity={self.capacity}: one block takes {largest} bytes; "
                f"give capacity={format_size(largest).replace(' ', '')} or more"
            )
        unit = min(_SHARED_UNIT, self.capacity)
        if len(frames) == 1:
            unit = (
                -(-largest // (_PARTS * ALIGNMENT)) * ALIGNMENT if self._short_values else largest
            )
        self._region = MemoryRegion(self.capacity, unit)
        self._index = MemoryIndex(self._region.num_units)
        self._copying = Lane("kvconnect-memory", 2)

    async def close(self) -> None:
        """Let go of the region, as soon as copies in flight have ended."""
        copying, self._copying = self._copying, None
        self._index = self._region = None
        if copying is not None:
            await copying.close()
            copying.join()

    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        """How many leading `keys` are present; they count as used now."""
        return len(self._opened()[0].use(keys))

    async def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        """Copy blocks out. Nothing fails: what is absent or longer than its buffer is a miss."""
        return await self._load(keys, into, ())

    async def load_hashed(
        self, keys: Sequence[BlockKey], into: Sequence[Tensor], checksums: Sequence[FrameChecksum]
    ) -> int:
        """The same; the checksums are taken as the bytes arrive."""
        return await self._load(keys, into, checksums)

    async def _load(
        self, keys: Sequence[BlockKey], into: Sequence[Tensor], checksums: Sequence[FrameChecksum]
    ) -> int:
        index, region, copying = self._opened()
        blocks = index.use(keys)
        for number, (block, buffer) in enumerate(zip(blocks, into, strict=False)):
            if block.nbytes > buffer.numel():
                del blocks[number:]
                break

        copies = [
            Copy(list(region.parts(block.units, _array(buffer, checksum), block.nbytes)), checksum)
            for block, buffer, checksum in zip_longest(blocks, into, checksums)
            if block is not None
        ]
        index.hold(blocks)
        try:
            await copy_all(copies, copying)
        finally:
            index.release(blocks)
        return len(blocks)

    async def save(self, blocks: Sequence[StoredBlock]) -> int:
        """Copy blocks in, dropping older ones for room; a block is visible once it is whole."""
        return await self._save(blocks, ())

    async def save_sealed(
        self, blocks: Sequence[StoredBlock], checksums: Sequence[FrameChecksum]
    ) -> int:
        """The same; new blocks are sealed as they are read."""
        return await self._save(blocks, checksums)

    async def _save(self, blocks: Sequence[StoredBlock], checksums: Sequence[FrameChecksum]) -> int:
        index, region, copying = self._opened()
        now = index.tick()
        new: list[MemoryBlock] = []
        copies: list[Copy] = []
        present = 0
        for block, checksum in zip_longest(blocks, checksums):
            if not index.use_one(block.key, now):
                nbytes = block.data.numel()
                reserved = index.reserve(block, region.units_of(nbytes), now)
                if reserved is None:
                    break
                new.append(reserved)
                parts = region.parts(reserved.units, _array(block.data, checksum), nbytes)
                copies.append(Copy([(data, part) for part, data in parts], checksum, seals=True))
            present += 1

        try:
            await copy_all(copies, copying)
        except BaseException:
            for reserved in new:
                index.cancel(reserved)
            raise
        for reserved in new:
            index.publish(reserved)
        return present

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Forget `keys`; their memory is free once no copy runs on it."""
        self._opened()[0].delete(keys)

    async def children(self, key: BlockKey | None) -> Sequence[Child]:
        """The stored blocks with tokens whose parent is `key`."""
        return self._opened()[0].children(key)

    async def scan(self) -> AsyncIterator[StoredEntry]:
        """All blocks that were there when it began."""
        for block in self._opened()[0]:
            yield block.entry()

    async def describe(self, keys: Sequence[BlockKey]) -> Sequence[StoredEntry | None]:
        """What `scan` would list of each of `keys`."""
        index = self._opened()[0]
        found = [index.get(key) for key in keys]
        return [None if block is None else block.entry() for block in found]

    async def stats(self) -> Mapping[str, float]:
        """``blocks``, ``bytes`` taken by them, and ``capacity``."""
        index, region, _ = self._opened()
        used = index.units_used * region.unit
        return {"blocks": len(index), "bytes": used, "capacity": self.capacity}

    def _opened(self) -> tuple[MemoryIndex, MemoryRegion, Lane]:
        if self._index is None or self._region is None or self._copying is None:
            raise BackendUnavailable("memory store: is not open")
        return self._index, self._region, self._copying


def _array(buffer: Tensor, checksum: FrameChecksum | None) -> NDArray[np.uint8]:
    array: NDArray[np.uint8] = buffer.numpy() if checksum is None else checksum.array
    return array
