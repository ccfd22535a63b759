"""The secondary blocks of one pool: host copies of blocks that were reclaimed from primary."""

from __future__ import annotations

from array import array

from kvconnect.cache.memory.copier import BlockCopier
from kvconnect.cache.pool.published_blocks import PublishedBlocks
from kvconnect.cache.tree.radix_tree import RadixTree
from kvconnect.cache.tree.segment import BlockIds, Segment, new_ids


class HostTier:
    """Assigns host blocks to reclaimed primary ones, and evicts copies of lower priority.

    Attributes:
        num_blocks: the number of all host blocks; 0 if there is no host tier.
        min_priority: blocks of lower priority are dropped instead of offloaded.
        blank: the ids of unused host blocks.
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
        """Copies up to `count` last primary blocks of `segment`, which has no holder, to the host.

        Returns the copied part, which is split off as a segment. Returns ``None`` if not even the
        last block may be offloaded.
        """
        if not self.num_blocks or not self.wants(segment):
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

    def wants(self, segment: Segment) -> bool:
        """Returns whether the priority of `segment` is high enough for offloading."""
        return self._published.effective_priority(segment) >= self.min_priority

    def onboard(self, segment: Segment, ids: BlockIds) -> None:
        """Copies the host blocks of `segment` to primary blocks `ids`; changes no other state."""
        group = self._published.group
        host_ids = segment.pools[group].host_ids
        if self._copier is not None and host_ids is not None:
            self._copier.onboard(group, host_ids, ids)

    def exchange(self, leaving: Segment, coming: Segment, room: BlockIds) -> BlockIds:
        """Offloads `leaving`, last block first, and onboards `coming` into its primary blocks.

        The first offloaded block is copied to the host block `room`, each other one to the host
        block of the block that was onboarded just before. Returns the primary blocks of `coming`.
        Only the last host copy of `coming` stays valid.
        """
        group = self._published.group
        left, came = leaving.pools[group], coming.pools[group]
        if left.ids is None or came.host_ids is None:
            return new_ids()
        ids = left.ids[::-1]
        taken = room + came.host_ids[:-1]
        if self._copier is not None:
            for block, place, source in zip(ids, taken, came.host_ids, strict=True):
                self._copier.offload(group, [block], [place])
                self._copier.onboard(group, [source], [block])
        left.host_ids = taken[::-1]
        return ids

    def release(self, segment: Segment) -> None:
        """Makes the host blocks of `segment` blank, if it has a host copy."""
        self.blank.extend(self._published.lose_copy(segment))

    def _make_room(self, newcomer: Segment, count: int) -> BlockIds:
        # Returns up to `count` host blocks: blank ones first, then copies of blocks in primary,
        # then those of no higher priority. Returns none if every copy has a higher priority.
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
        # After the newcomer's first block is offloaded, it may come before the rest of the victim.
        victim = self._tree.last_blocks(victim, count if order < standing else 1)
        ids = self._published.lose_copy(victim)
        self._published.remove(victim)
        return ids
