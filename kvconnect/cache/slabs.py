"""Memory that pools give each other: slabs of the arena that all of them are cut from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvconnect.cache.block_pool import BlockPool
from kvconnect.cache.copier import BlockCopier
from kvconnect.cache.pin_table import PinTable
from kvconnect.cache.radix_tree import RadixTree
from kvconnect.cache.sequence import Sequence as LiveSequence
from kvconnect.cache.sizing import SlabGeometry

__all__ = ["SlabMove", "Slabs"]


class SlabMove(NamedTuple):
    """One slab changes pools."""

    slab: int
    giver: int
    taker: int


class Slabs:
    """Which pool has which part of the memory.

    Args:
        pools: of one cache.
        tree: where their blocks are published.
        geometry: of the arena; ``None``: the split is fixed.
        copier: moves the content of blocks.
    """

    def __init__(
        self,
        pools: Sequence[BlockPool],
        tree: RadixTree,
        geometry: SlabGeometry | None,
        copier: BlockCopier | None,
    ) -> None:
        self._pools = pools

    def holders(self, sequences: Mapping[int, LiveSequence], pins: PinTable) -> None:
        """Who holds blocks, besides the tree."""

    def plan(self, needs: Sequence[int]) -> Sequence[SlabMove] | None:
        """What must move so that each pool has so many free blocks; ``None``: nothing helps."""
        for need, pool in zip(needs, self._pools, strict=True):
            if need > pool.num_free:
                return None
        return ()

    def carry_out(self, moves: Sequence[SlabMove]) -> None:
        """Move them; `plan` returned them, and only references were taken since."""
