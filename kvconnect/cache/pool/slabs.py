"""Moves memory between pools, in slabs of the arena that all of them share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvconnect.cache.memory.copier import BlockCopier
from kvconnect.cache.memory.sizing import SlabGeometry
from kvconnect.cache.pool.block_pool import BlockPool
from kvconnect.cache.pool.held_blocks import HeldPath
from kvconnect.cache.tree.radix_tree import RadixTree
from kvconnect.cache.tree.segment import BlockIds, Segment, new_ids
from kvconnect.errors import OutOfBlocks

Ids = npt.NDArray[np.int32]

_FIXED = SlabGeometry(0, (), ())
"""The geometry of pools that exchange no memory."""


class Holder(Protocol):
    """A holder of blocks: a sequence or a pin."""

    @property
    def held(self) -> Sequence[HeldPath]:
        """The held blocks by pool group."""


class SlabMove(NamedTuple):
    """The move of the slab number `slab` from pool group `giver` to pool group `taker`."""

    slab: int
    giver: int
    taker: int


class Slabs:
    """The slabs of memory of each pool.

    A pool with too few blocks gets whole slabs from pools with more free blocks than they need.
    Unreferenced blocks in such a slab are moved within their pool, so that the least recently used
    blocks are reclaimed, not those in the slab.

    Args:
        pools: the pools of one cache.
        tree: the tree with the published blocks of the pools.
        geometry: the slabs of the arena; ``None`` if the pools exchange no memory.
        copier: moves the content of blocks.
    """

    def __init__(
        self,
        pools: Sequence[BlockPool],
        tree: RadixTree,
        *,
        geometry: SlabGeometry | None,
        copier: BlockCopier | None,
    ) -> None:
        self._pools = pools
        self._tree = tree
        self._geometry = geometry = geometry or _FIXED
        self._copier = copier
        self._owners = list(geometry.owners)
        self._holders: tuple[Iterable[Holder], ...] = ()

    def watch(self, *holders: Iterable[Holder]) -> None:
        """Sets the live collections of holders; slabs with blocks of a holder never move."""
        self._holders = holders

    def plan(self, needs: Sequence[int]) -> Collection[SlabMove] | None:
        """Returns the moves after which each pool has ``needs[group]`` free blocks.

        Returns ``None`` if no moves suffice. Changes nothing.
        """
        for pool, need in zip(self._pools, needs, strict=True):
            if pool.num_free < need:
                break
        else:
            return ()
        if not self._owners:
            return None
        spare = [pool.num_free - need for pool, need in zip(self._pools, needs, strict=True)]
        sizes = self._geometry.blocks_per_slab
        whole = [left // size for left, size in zip(spare, sizes, strict=True)]
        missing = [max(-slabs, 0) for slabs in whole]
        if sum(whole) < 0:
            return None
        slabs_of = {
            group: self._movable(group)[:slabs] for group, slabs in enumerate(whole) if slabs > 0
        }
        moves = []
        for taker, count in enumerate(missing):
            for _ in range(count):
                giver = max(slabs_of, key=lambda group: len(slabs_of[group]), default=taker)
                if not slabs_of.get(giver):
                    return None
                moves.append(SlabMove(slabs_of[giver].pop(0), giver, taker))
        return moves

    def carry_out(self, moves: Collection[SlabMove]) -> None:
        """Carries out `moves`, a result of `plan`. Only references may have been added since."""
        for giver in {move.giver for move in moves}:
            slabs = [move.slab for move in moves if move.giver == giver]
            self._clear(self._pools[giver], slabs)
        for move in moves:
            self._owners[move.slab] = move.taker
            self._pools[move.taker].grow(self._geometry.block_ids(move.slab, move.taker))

    def ensure_free(self, needs: Sequence[int]) -> bool:
        """Makes ``needs[group]`` blocks of each pool free; returns False if that is not possible.

        Moves slabs for that. If the result is False, nothing changed.
        """
        moves = self.plan(needs)
        if moves is None:
            return False
        self.carry_out(moves)
        return True

    def supply(self, needs: Sequence[int]) -> None:
        """Moves slabs so that each pool can allocate ``needs[group]`` blocks.

        Raises:
            OutOfBlocks: that is not possible; nothing changed.
        """
        if not self.ensure_free(needs):
            wanted = "/".join(map(str, needs))
            raise OutOfBlocks(f"{wanted} blocks are needed; {self.free_blocks()}")

    def free_blocks(self) -> str:
        """Returns a description of the free blocks of each pool, for messages."""
        return ", ".join(
            f"{pool.num_free} of {pool.num_blocks} are free"
            + ("" if pool.window is None else f" in the pool of window {pool.window}")
            for pool in self._pools
        )

    # ---------------------------------------------------------------- inside

    def _movable(self, group: int) -> list[int]:
        # Returns the pool's slabs in which no block is held, those with most blank ones first.
        size = self._geometry.blocks_per_slab[group]
        occupied: set[int] = set()
        for holder in chain(*self._holders):
            for ids in holder.held[group].ids_held():
                occupied.update((_array(ids) // size).tolist())
        blank = np.bincount(
            _array(self._pools[group].private.blank) // size, minlength=len(self._owners)
        )
        mine = [slab for slab, owner in enumerate(self._owners) if owner == group]
        free = [slab for slab in mine if slab not in occupied]
        return sorted(free, key=lambda slab: -int(blank[slab]))

    def _clear(self, pool: BlockPool, slabs: list[int]) -> None:
        # Empties these slabs and removes them from the pool.
        size = self._geometry.blocks_per_slab[pool.group]
        while True:
            pool.private.blank = _outside(pool.private.blank, slabs, size)
            lying = list(self._lying(pool.group, slabs, size))
            count = sum(len(numbers) for _, numbers in lying)
            if len(pool.private.blank) >= count:
                break
            pool.make_blank(count)  # perhaps blocks of these slabs, so try again
        sources, targets = new_ids(), pool.allocate(count)
        for segment, numbers in lying:
            ids = segment.pools[pool.group].ids or new_ids()
            for number in numbers:
                target = targets[len(sources)]
                sources.append(ids[number])
                ids[number] = target
        pool.num_blocks -= size * len(slabs)
        if sources and self._copier is not None:
            self._copier.move(pool.group, sources, targets)

    def _lying(
        self, group: int, slabs: list[int], size: int
    ) -> Iterator[tuple[Segment, list[int]]]:
        # Yields the segments with blocks in these slabs, and the indices of those blocks.
        for segment in self._tree.segments():
            ids = segment.pools[group].ids
            if ids:
                numbers = np.flatnonzero(np.isin(_array(ids) // size, slabs))
                if len(numbers):
                    yield segment, numbers.tolist()


def _array(ids: BlockIds) -> Ids:
    return np.frombuffer(ids, np.int32) if ids else np.empty(0, np.int32)


def _outside(ids: BlockIds, slabs: list[int], size: int) -> BlockIds:
    """Returns the ids of the blocks outside `slabs`, in the same order."""
    array = _array(ids)
    outside = new_ids()
    outside.frombytes(array[~np.isin(array // size, slabs)].tobytes())
    return outside
