"""Numbers the memory of pools in slots, so that two uses of the same memory can be detected."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.layout import KvCacheLayout

__all__ = ["BlockSlots", "number_slots"]


class BlockSlots:
    """The slots of the blocks of one pool. A slot is a numbered piece of memory.

    Attributes:
        kv: the pool, in the form that copies need.
    """

    def __init__(
        self, pool: Tensor, layout: KvCacheLayout, first_slot: int, slot_nbytes: int
    ) -> None:
        self.kv = PagedKv.from_pool(pool, layout)
        self._first_slot = first_slot
        self._slot_nbytes = slot_nbytes
        self._offset = pool.data_ptr() - pool.untyped_storage().data_ptr()

    def slots(self, ids: Sequence[int]) -> list[int]:
        """Returns the numbers of the slots that the blocks `ids` overlap, perhaps repeated."""
        first, size, nbytes = self._first_slot, self._slot_nbytes, self.kv.block_nbytes
        if size == nbytes and not self._offset:
            return [first + block_id for block_id in ids]
        starts = [self._offset + block_id * nbytes for block_id in ids]
        return [
            slot
            for start in starts
            for slot in range(first + start // size, first + (start + nbytes - 1) // size + 1)
        ]


def number_slots(pools: Sequence[tuple[Tensor, KvCacheLayout]]) -> list[BlockSlots]:
    """Returns the slots of each pool, such that two blocks that share a byte have a common slot.

    Pools in one arena get slots of the size of their largest block. Neighbouring blocks may then
    have a common slot without a common byte, which only costs a wait.
    """
    sizes: dict[int, int] = {}
    for pool, layout in pools:
        memory = pool.untyped_storage().data_ptr()
        sizes[memory] = max(sizes.get(memory, 1), layout.block_nbytes)
    firsts: dict[int, int] = {}
    next_slot = 0
    numbered = []
    for pool, layout in pools:
        storage = pool.untyped_storage()
        memory = storage.data_ptr()
        if memory not in firsts:
            firsts[memory] = next_slot
            next_slot += -(-storage.nbytes() // sizes[memory])
        numbered.append(BlockSlots(pool, layout, firsts[memory], sizes[memory]))
    return numbered
