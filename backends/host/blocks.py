"""The blocks in one region of host memory: copied in, copied out, and dropped for room."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvconnect.backend import Child, StoredBlock, StoredEntry
from kvconnect.backends.host.copier import Copy, copy_all
from kvconnect.backends.host.index import MemoryBlock, MemoryIndex
from kvconnect.backends.host.region import MemoryRegion
from kvconnect.backends.lanes import Lane
from kvconnect.backends.quotas import Quotas
from kvconnect.backends.url import format_size
from kvconnect.errors import ConfigurationError
from kvconnect.frame import ALIGNMENT, FrameChecksum, frame_nbytes
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout

# With one layout, a block is one unit and one copy. With several, blocks of any size share small
# units.
_SHARED_UNIT = 64 << 10
_SCRUB_NBYTES = 16 << 20
# The units per block, if values may be shorter than blocks.
_PARTS = 16


def unit_nbytes(
    capacity: int, layouts: Sequence[KvCacheLayout], *, short_values: bool = False
) -> int:
    """Returns the bytes of the units in which `capacity` bytes are allocated.

    Raises:
        ConfigurationError: `capacity` is below one block.
    """
    frames = {frame_nbytes(layout.block_nbytes) for layout in layouts}
    largest = max(frames, default=0)
    if capacity < largest:
        raise ConfigurationError(
            f"capacity={capacity}: one block takes {largest} bytes; "
            f"give capacity={format_size(largest).replace(' ', '')} or more"
        )
    if len(frames) != 1:
        return min(_SHARED_UNIT, capacity)
    return -(-largest // (_PARTS * ALIGNMENT)) * ALIGNMENT if short_values else largest


class HostBlocks:
    """The blocks in one region. Thread-safe but for `load` and `save`, which are the event loop's.

    Eviction takes the least recently used block first, low priority before high, chains from their
    end. Large copies run on a lane, on blocks that are held meanwhile. A held block is not dropped;
    a deleted block keeps its bytes until it is held no more.

    Args:
        region: holds the bytes.
        lane: the two threads for copies.
        quotas: the tenants' shares of the region; ``None``: all blocks are alike.
    """

    def __init__(self, region: MemoryRegion, lane: Lane, quotas: Quotas | None = None) -> None:
        self.region = region
        self.index = MemoryIndex(region.num_units, quotas)
        self._lane = lane
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.index)

    @property
    def nbytes(self) -> int:
        """The bytes of the units that are in use."""
        return self.index.units_used * self.region.unit

    def lookup(self, keys: Sequence[BlockKey]) -> int:
        """Returns how many leading `keys` are present; they count as used now."""
        with self._lock:
            return len(self.index.use(keys))

    def present(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Returns for each of `keys` whether it is present; those count as used now."""
        with self._lock:
            now = self.index.tick()
            return [self.index.use_one(key, now) for key in keys]

    def hold(self, keys: Sequence[BlockKey]) -> list[MemoryBlock]:
        """Returns the leading blocks of `keys` that are present, held until `release`."""
        with self._lock:
            blocks = self.index.use(keys)
            self.index.hold(blocks)
            return blocks

    def release(self, blocks: Sequence[MemoryBlock]) -> None:
        """Ends a `hold` of `blocks`."""
        with self._lock:
            self.index.release(blocks)

    async def load(
        self, keys: Sequence[BlockKey], into: Sequence[Tensor], checksums: Sequence[FrameChecksum]
    ) -> int:
        """Copies blocks out; returns how many leading ones were copied.

        A block that is absent or longer than its buffer is a miss. Each of `checksums` hashes the
        bytes as they arrive.
        """
        blocks = self.hold(keys)
        try:
            fitting = 0
            for block, buffer in zip(blocks, into, strict=False):
                if block.nbytes > buffer.numel():
                    break
                fitting += 1
            copies = [
                Copy(
                    list(self.region.parts(block.units, _array(buffer, checksum), block.nbytes)),
                    checksum,
                )
                for block, buffer, checksum in zip_longest(blocks[:fitting], into, checksums)
                if block is not None
            ]
            await copy_all(copies, self._lane)
            for block in blocks[:fitting]:
                block.hits += 1
        finally:
            self.release(blocks)
        return fitting

    async def save(self, blocks: Sequence[StoredBlock], checksums: Sequence[FrameChecksum]) -> int:
        """Copies blocks in, dropping older ones for room; a block is visible once it is whole.

        Returns:
            The number of leading blocks that are present now. Each of `checksums` seals its block
            while it is read.
        """
        new: list[MemoryBlock] = []
        copies: list[Copy] = []
        present = 0
        with self._lock:
            now = self.index.tick()
            for block, checksum in zip_longest(blocks, checksums):
                if not self.index.use_one(block.key, now):
                    nbytes = block.data.numel()
                    reserved = self.index.reserve(block, self.region.units_of(nbytes), now)
                    if reserved is None:
                        break
                    new.append(reserved)
                    parts = self.region.parts(reserved.units, _array(block.data, checksum), nbytes)
                    copies.append(
                        Copy([(data, part) for part, data in parts], checksum, seals=True)
                    )
                present += 1
        try:
            await copy_all(copies, self._lane)
        except BaseException:
            with self._lock:
                for reserved in new:
                    self.index.cancel(reserved)
            raise
        with self._lock:
            for reserved in new:
                self.index.publish(reserved)
        return present

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Deletes `keys`; their memory is free once it is no longer held."""
        with self._lock:
            self.index.delete(keys)

    def scrub(self) -> bool:
        """Overwrites some of the free memory that held blocks; returns whether there may be more.

        Blocks for some milliseconds.
        """
        with self._lock:
            units = self.index.take_leftovers(max(1, _SCRUB_NBYTES // self.region.unit))
            for view in self.region.views(units, len(units) * self.region.unit):
                view[:] = 0
        return bool(units)

    def pin(self, keys: Sequence[BlockKey], until: float | None, most: int) -> list[bool]:
        """Pins or unpins `keys`; all pinned blocks take `most` bytes at most; see `Backend.pin`."""
        with self._lock:
            return self.index.pin(keys, until, most // self.region.unit)

    def pinned(self) -> tuple[int, int]:
        """Returns the number and the bytes of pinned blocks."""
        with self._lock:
            pinned = self.index.pinned()
        return len(pinned), sum(len(block.units) for block in pinned) * self.region.unit

    def children(self, key: BlockKey | None) -> list[Child]:
        """Returns the blocks with tokens whose parent is `key`."""
        with self._lock:
            return self.index.children(key)

    def entries(self) -> list[StoredEntry]:
        """Returns the entries of all blocks for `Backend.scan`."""
        with self._lock:
            return [block.entry() for block in self.index]

    def describe(self, keys: Sequence[BlockKey]) -> list[StoredEntry | None]:
        """Returns the entry that `entries` would list for each of `keys`."""
        with self._lock:
            found = [self.index.get(key) for key in keys]
            return [None if block is None else block.entry() for block in found]


def _array(buffer: Tensor, checksum: FrameChecksum | None) -> NDArray[np.uint8]:
    array: NDArray[np.uint8] = buffer.numpy() if checksum is None else checksum.array
    return array
