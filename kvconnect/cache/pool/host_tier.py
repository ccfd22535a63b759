"""The secondary blocks of one pool: copies in host memory of what was reclaimed from primary."""

from __future__ import annotations

from array import array

from kvconnect.cache.memory.copier import BlockCopier
from kvconnect.cache.pool.published_blocks import PublishedBlocks
from kvconnect.cache.tree.radix_tree import RadixTree
from kvconnect.cache.tree.residence import BlockIds, new_ids
from kvconnect.cache.tree.segment import Segment

__all__ = ["HostTier"]


class HostTier:
    """Gives host blocks to reclaimed primary ones, and takes them from what matters less.

    Attributes:
        num_blocks: in all; 0: there is no such tier.
        min_priority: blocks below it are dropped instead of offloaded.
        blank: ids that hold nothing.
    """

    def __init__(
        self,
        published: PublishedBlocks,
        num_blocks: int,
        *,
        min_priority: int,
        tree: RadixTree,
        copier: BlockCopier | None,
    ) -> None:
        self.num_blocks = num_blocks
        self.min_priority = min_priority
        self.blank: BlockIds = array("i", range(num_blocks - 1, -1, -1))
        self._published = published
        self._tree = tree
        self._copier = copier

    def offload(self, segment: Segment, count: int) -> Segment | None:
        """Copy some of the last `count` primary blocks of `segment`, which has no holder.

        Returns what was copied, divided off; ``None``: not even the last block may come here.
        """
        if not self.num_blocks or self._published.effective_priority(segment) < self.min_priority:
            return None
        host_ids = self._make_room(segment, count)
        if not host_ids:
            return None
        group = self._published.group
        part = self._tree.last_blocks(segment, len(host_ids))
        state = part.pools[group]
        state.host_ids = host_ids
        if self._copier is not None and state.ids is not None:
            self._copier.offload(group, state.ids, host_ids)
        return part

    def release(self, segment: Segment) -> None:
        """`segment` has no host copy any more, if it had one."""
        self.blank.extend(self._published.lose_copy(segment))

    def _make_room(self, newcomer: Segment, count: int) -> BlockIds:
        # Up to `count` host blocks; none: what is here stays. Blank ones first, then copies of what
        # is in primary, then what has no higher priority.
        if self.blank:
            taken = self.blank[-count:]
            del self.blank[-count:]
            return taken
        candidates = self._published.candidates
        if candidates.redundant:
            copied = self._tree.last_blocks(candidates.redundant.first(), count)
            return self._published.lose_copy(copied)
        if not candidates.sole:
            return new_ids()
        victim = candidates.sole.first()
        order, standing = candidates.sole.order_of(victim), candidates.sole.order_of(newcomer)
        if order[0] > standing[0]:
            return new_ids()
        # Once the first newcomer is here, it may stand before what is left of the victim.
        victim = self._tree.last_blocks(victim, count if order < standing else 1)
        ids = self._published.lose_copy(victim)
        self._published.remove(victim)
        return ids
