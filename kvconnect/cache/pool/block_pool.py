"""The blocks of one pool: allocates them, and reclaims published ones if too few are blank."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvconnect.cache.memory.copier import BlockCopier
from kvconnect.cache.memory.sizing import PoolSizes
from kvconnect.cache.pool.events import EventLog
from kvconnect.cache.pool.host_tier import HostTier
from kvconnect.cache.pool.private_blocks import PrivateBlocks
from kvconnect.cache.pool.published_blocks import PublishedBlocks
from kvconnect.cache.tree.radix_tree import RadixTree
from kvconnect.cache.tree.segment import BlockIds, Segment
from kvconnect.config import KvCacheConfig
from kvconnect.errors import OutOfBlocks


class BlockPool:
    """The blocks of one pool group.

    Every block is in one of four states: blank; private (of a sequence or a pin, not in the tree);
    published and referenced; published and unreferenced. Unreferenced blocks can be reclaimed, all
    of them, by removing leaves of the tree one after the other.

    Args:
        group: the number of the pool group.
        tree: the tree of published paths.
        config: has the least priority of blocks that are offloaded.
        sizes: the sizes of all pools.
        clock: returns seconds.
        copier: carries out copies; ``None`` for no copies.
        events: records changes of published blocks.

    Attributes:
        group: the number of the pool group.
        window: the attention window in tokens; ``None`` for full attention.
        is_state: whether the blocks are snapshots of recurrent states. Then the window is one
            block, a sequence holds at most one block, and no block can be matched in part.
        num_blocks: the number of all blocks.
        num_reclaimed: how many published blocks have left primary so far.
        private: the blank and the private blocks.
        published: the blocks in the tree.
        host: the secondary tier. If it has no blocks, reclaimed blocks are dropped.
    """

    def __init__(
        self,
        group: int,
        tree: RadixTree,
        *,
        config: KvCacheConfig,
        sizes: PoolSizes,
        clock: Callable[[], float],
        copier: BlockCopier | None,
        events: EventLog,
    ) -> None:
        layout = sizes.layouts[group]
        ids: Iterable[int] = range(sizes.num_blocks[group])
        if sizes.slabs is not None:
            owned = [slab for slab, owner in enumerate(sizes.slabs.owners) if owner == group]
            ids = [block for slab in owned for block in sizes.slabs.block_ids(slab, group)]
        self.group = group
        self.window = layout.window
        self.is_state = layout.kind == "state"
        self.num_reclaimed = 0
        self.private = PrivateBlocks(ids)
        self.num_blocks = len(self.private.blank)
        log = events if events.is_on else None
        self.published = PublishedBlocks(
            group, layout.window, tree, private=self.private, clock=clock, events=log
        )
        least, num_host = config.secondary_offload_min_priority, sizes.num_host_blocks[group]
        self.host = HostTier(self.published, num_host, min_priority=least, tree=tree, copier=copier)
        self._tree = tree

    @property
    def num_free(self) -> int:
        """The number of blocks that can be allocated now."""
        return len(self.private.blank) + self.published.num_unreferenced

    def reset(self) -> None:
        """Makes all blocks blank. No block may be held. The caller clears the tree afterwards."""
        for segment in self._tree.segments():
            ids = segment.pools[self.group].ids
            if ids is not None:
                self.private.blank.extend(ids)
            self.host.release(segment)
        self.published.clear()

    def grow(self, ids: range) -> None:
        """Adds the blank blocks `ids`, whose memory another pool owned before."""
        self.num_blocks += len(ids)
        self.private.add(ids)

    # ---------------------------------------------------------------- allocating

    def require(self, count: int) -> None:
        """Checks that `count` blocks can be allocated now.

        Raises:
            OutOfBlocks: fewer blocks are free.
        """
        if count > self.num_free:
            raise OutOfBlocks(
                f"{count} blocks are needed, {self.num_free} of {self.num_blocks} are free"
            )

    def allocate(self, count: int) -> BlockIds:
        """Allocates `count` private blocks and returns their ids.

        Reclaims published blocks if too few are blank.

        Raises:
            OutOfBlocks: fewer blocks are free; nothing changed.
        """
        if count > len(self.private.blank):
            self.require(count)
            self.make_blank(count)
        return self.private.take(count)

    def make_blank(self, count: int) -> None:
        """Reclaims published blocks until `count` are blank. At least `count` must be free."""
        blank = self.private.blank
        num_blank = len(blank)
        while len(blank) < count:
            blank.extend(self._reclaim(count - len(blank)))
        self.num_reclaimed += len(blank) - num_blank

    def take(self, segment: Segment) -> BlockIds:
        """Removes from the tree a segment without children that only the caller holds.

        Returns its primary blocks, if any, which are private now. A host copy becomes blank.
        """
        self.published.dereference(segment, self.published.next_moment())
        self.host.release(segment)
        return self.published.remove(segment)

    def discard(self, segment: Segment) -> None:
        """Removes from the pool a segment without a holder; its blocks become blank."""
        self.host.release(segment)
        self.private.blank.extend(self.published.remove(segment))

    # ---------------------------------------------------------------- onboarding

    def onboard(self, segment: Segment) -> None:
        """Copies `segment`, which has holders and is in secondary only, to primary blocks.

        The blocks are onboarded one by one. The host copy of an onboarded block is redundant: its
        host block can take the primary block that is reclaimed for the next one. As many blocks as
        the segment has must be free.
        """
        parts: list[Segment] = []
        while segment.pools[self.group].ids is None:
            exchanged = self._exchange(segment, parts[-1]) if parts else ()
            parts.extend(exchanged or [self._bring_back(segment)])
        for part in parts[:-1]:
            self._tree.join(part, same_holders=True)

    def _bring_back(self, segment: Segment) -> Segment:
        # Onboards the first block, or as many as blank primary and host blocks make room for.
        count = max(len(self.private.blank) + len(self.host.blank), 1)
        part = self._first_blocks(segment, count)
        ids = self.allocate(len(part))
        self.host.onboard(part, ids)
        self.published.adopt(part, ids, None, 0)
        return part

    def _exchange(self, segment: Segment, before: Segment) -> tuple[Segment, ...]:
        # Does the same for a run of blocks at once. Each offloaded block gets the host block of the
        # block that was onboarded just before, and the next onboarded block gets its primary block.
        # Returns nothing if one block at a time would have another result.
        published, host = self.published, self.host
        if self.private.blank or host.blank or published.candidates.redundant.first() is not before:
            return ()
        leaving = published.candidates.primary.first()
        if leaving.pools[self.group].host_ids is not None or not host.wants(leaving):
            return ()
        part = self._first_blocks(segment, len(leaving))
        leaving = self._tree.last_blocks(leaving, len(part))
        room = published.lose_copy(self._tree.last_blocks(before, 1))
        ids = host.exchange(leaving, part, room)
        published.evict(leaving)
        self.num_reclaimed += len(ids)
        if len(part) == 1:
            published.adopt(part, ids, None, 0)
            return (part,)
        upper = self._tree.split(part, part.end - 1)
        published.lose_copy(upper)
        published.adopt(upper, ids[:-1], None, 0)
        published.adopt(part, ids[-1:], None, 0)
        return upper, part

    def _first_blocks(self, segment: Segment, count: int) -> Segment:
        if count < len(segment):
            return self._tree.split(segment, segment.start + count)
        return segment

    # ---------------------------------------------------------------- reclaiming

    def _reclaim(self, most: int) -> BlockIds:
        # The blocks of a segment follow each other in the order of reclaiming, last to first.
        segment = self.published.candidates.primary.first()
        count = min(most, segment.end - segment.start)
        if segment.pools[self.group].host_ids is not None:
            return self.published.evict(self._tree.last_blocks(segment, count))
        copied = self.host.offload(segment, count)
        return self._drop(segment, count) if copied is None else self.published.evict(copied)

    def _drop(self, segment: Segment, count: int) -> BlockIds:
        if self.window is None and segment.pools[self.group].resident_below:
            # Descendants in secondary cannot be reached without the last block. To drop them makes
            # room in secondary, perhaps for the block before the last one.
            self._drop_descendants(segment)
            count = 1
        elif count < len(segment) and len(segment.pools) == 1 and not segment.children:
            # No other pool, tier or child has these blocks, so the segment need not be divided.
            return self.published.cut(segment, count)
        return self.published.remove(self._tree.last_blocks(segment, count))

    def _drop_descendants(self, segment: Segment) -> None:
        waiting = list(segment.children.values())
        gone = []
        while waiting:
            below = waiting.pop()
            if below.pools[self.group].host_ids is not None:
                gone.append(below)
                waiting.extend(below.children.values())
        for below in reversed(gone):
            self.host.release(below)
            self.published.remove(below)
