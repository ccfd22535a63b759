"""The memory that receives blocks of peers: a registered buffer of the caller, or a slot."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvconnect.backends.host.region import MemoryRegion

if TYPE_CHECKING:
    from torch import Tensor

_SLOTS = 8


class Staging:
    """The slots of memory, each for one portion. `take` and `give_back` are the event loop's.

    Args:
        nbytes: the bytes of all slots together.

    Attributes:
        slot_nbytes: the bytes of each slot.
        region: the transport's number of the memory; set once it is registered.
    """

    def __init__(self, nbytes: int) -> None:
        self.slot_nbytes = nbytes // _SLOTS
        self.region = 0
        self._memory = MemoryRegion(self.slot_nbytes * _SLOTS, self.slot_nbytes)
        self._free: asyncio.LifoQueue[int] = asyncio.LifoQueue()
        for slot in reversed(range(_SLOTS)):
            self._free.put_nowait(slot)
        self._registered: tuple[tuple[int, Tensor], ...] = ()

    @property
    def tensor(self) -> Tensor:
        """The memory of all slots."""
        return self._memory.tensor

    def add(self, region: int, memory: Tensor) -> None:
        """Adds `memory`, the transport's `region`, which can receive blocks without a copy."""
        self._registered = (*self._registered, (region, memory))

    async def take(self) -> int:
        """Returns the offset of a free slot; waits for one."""
        return await self._free.get() * self.slot_nbytes

    def give_back(self, offset: int) -> None:
        """Frees the slot at `offset`; no transfer may write to it any more."""
        self._free.put_nowait(offset // self.slot_nbytes)

    def direct(self, buffers: Sequence[Tensor]) -> tuple[int, list[int]] | None:
        """Returns the registered region that all `buffers` are in, and their offsets in it.

        Returns ``None`` if no single region has them all.
        """
        for region, memory in self._registered:
            first = memory.data_ptr()
            starts = [buffer.data_ptr() - first for buffer in buffers]
            if all(
                start >= 0 and start + buffer.numel() <= memory.nbytes
                for start, buffer in zip(starts, buffers, strict=True)
            ):
                return region, starts
        return None
