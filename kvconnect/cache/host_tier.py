"""The secondary blocks of one pool: copies in host memory of what was reclaimed from primary."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator

from kvconnect.cache.block_pool import BlockPool
from kvconnect.cache.copier import BlockCopier
from kvconnect.cache.events import EventLog
from kvconnect.cache.radix_tree import RadixTree
from kvconnect.cache.reclaim_queue import ReclaimOrder, ReclaimQueue
from kvconnect.cache.segment import BlockIds, Segment, new_ids
from kvconnect.cache.sizing import PoolSizes
from kvconnect.config import KvCacheConfig

__all__ = ["HostTier", "make_pools"]


class HostTier:
    """Gives host blocks to reclaimed primary ones, and takes them from what matters less.

    Attributes:
        num_blocks: in all.
        min_priority: blocks below it are dropped instead of offloaded.
        blank: ids that hold nothing.
        redundant: segments that are in primary, too: with their copies nothing is lost.
        sole: segments of which this is the only copy, and that may be dropped.
    """

    def __init__(
        self,
        pool: BlockPool,
        num_blocks: int,
        min_priority: int,
        tree: RadixTree,
        clock: Callable[[], float],
        copier: BlockCopier | None,
    ) -> None:
        self.num_blocks = num_blocks
        self.min_priority = min_priority
        self.blank: BlockIds = array("i", range(num_blocks - 1, -1, -1))
        self.redundant = ReclaimQueue(pool.group, clock)
        self.sole = ReclaimQueue(pool.group, clock)
        self._pool = pool
        self._tree = tree
        self._copier = copier

    def make_room(self, newcomer: ReclaimOrder, count: int) -> BlockIds:
        """Up to `count` host blocks for blocks of this standing; none: what is here stays.

        Blank ones first, then copies of what is in primary, then what has no higher priority.
        """
        if self.blank:
            taken = self.blank[-count:]
            del self.blank[-count:]
            return taken
        if self.redundant:
            return self.lose(self._last_blocks(self.redundant.first(), count))
        if not self.sole:
            return new_ids()
        victim = self.sole.first()
        order = self.sole.order_of(victim)
        if order[0] > newcomer[0]:
            return new_ids()
        # Once the first newcomer is here, it may stand before what is left of the victim.
        victim = self._last_blocks(victim, count if order < newcomer else 1)
        ids = self.lose(victim)
        self._pool.lost_copy(victim)
        return ids

    def copy_in(self, segment: Segment, host_ids: BlockIds) -> None:
        """Order copies of the primary blocks of `segment` to these host blocks."""
        state = segment.pools[self._pool.group]
        state.host_ids = host_ids
        if self._copier is not None and state.ids is not None:
            self._copier.offload(self._pool.group, state.ids, host_ids)

    def lose(self, segment: Segment) -> BlockIds:
        """`segment` has no host copy any more; the ids that held it are the caller's."""
        state = segment.pools[self._pool.group]
        ids, state.host_ids = state.host_ids, None
        self.redundant.discard(segment)
        self.sole.discard(segment)
        return ids if ids is not None else new_ids()

    def release(self, segment: Segment) -> None:
        """`segment` has no host copy any more, if it had one."""
        self.blank.extend(self.lose(segment))

    def reset(self, segments: Iterable[Segment]) -> None:
        """All blocks become blank; the caller empties the tree."""
        for segment in segments:
            self.release(segment)
        self.redundant.clear()
        self.sole.clear()

    def _last_blocks(self, segment: Segment, count: int) -> Segment:
        if count < len(segment):
            self._tree.split(segment, segment.end - count)
        return segment


def make_pools(
    config: KvCacheConfig,
    sizes: PoolSizes,
    tree: RadixTree,
    clock: Callable[[], float],
    copier: BlockCopier | None,
    events: EventLog,
) -> Iterator[BlockPool]:
    """The pools of a block manager, each with its host tier if that has blocks."""
    for group, layout in enumerate(sizes.layouts):
        ids: Iterable[int] = range(sizes.num_blocks[group])
        if sizes.slabs is not None:
            owned = [slab for slab, owner in enumerate(sizes.slabs.owners) if owner == group]
            ids = [block for slab in owned for block in sizes.slabs.block_ids(slab, group)]
        log = events if events.is_on else None
        pool = BlockPool(group, layout.window, ids, tree, clock, log)
        num_host = sizes.num_host_blocks[group]
        if num_host:
            priority = config.secondary_offload_min_priority
            pool.host = HostTier(pool, num_host, priority, tree, clock, copier)
        yield pool
