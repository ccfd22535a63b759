"""The blocks of one pool: which are blank, which are held, which may be reclaimed."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from math import inf

import numpy as np

from kvconnect.cache.radix_tree import RadixTree
from kvconnect.cache.reclaim_queue import ReclaimQueue, effective_priority
from kvconnect.cache.retention import DEFAULT_RETENTION, Retention, RetentionRun
from kvconnect.cache.segment import BlockIds, Segment, new_ids
from kvconnect.errors import OutOfBlocks

__all__ = ["BlockPool"]

_NEVER_LET_GO = -(1 << 62)
"""Stamps from here on count publishing; all are older than any moment of letting go."""


class BlockPool:
    """Allocates, references and reclaims the blocks of a full-attention pool.

    Every block is in one of four states: blank; private (of a sequence or a pin, not in the tree);
    published and referenced; published and unreferenced. References cover whole paths from the
    root, so an unreferenced block never has a referenced descendant, and every unreferenced block
    can be reclaimed by taking the tree apart from its leaves.
    """

    def __init__(self, num_blocks: int, tree: RadixTree, clock: Callable[[], float]) -> None:
        self.num_blocks = num_blocks
        self.queue = ReclaimQueue(clock)
        self.num_unreferenced = 0
        self._tree = tree
        self._clock = clock
        self._now = 0
        self._published = _NEVER_LET_GO
        # Holders of private blocks, counted only while pins hold some: 0 and 1 both mean one
        # holder.
        self._holders = np.zeros(num_blocks, np.int32)
        self.num_private_pins = 0
        self.blank: BlockIds = new_ids()
        self.reset()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self.blank) + self.num_unreferenced

    def reset(self) -> None:
        """All blocks are blank; the tree must be empty and nothing held."""
        self.blank = array("i", range(self.num_blocks - 1, -1, -1))
        self.queue.clear()
        self.num_unreferenced = 0

    # ---------------------------------------------------------------- private blocks

    def allocate(self, count: int) -> BlockIds:
        """`count` private blocks, reclaiming published ones where blank ones do not suffice.

        Raises:
            OutOfBlocks: there are not so many; nothing changed.
        """
        if count > self.num_free:
            raise OutOfBlocks(
                f"{count} blocks are needed, {self.num_free} of {self.num_blocks} are free"
            )
        while len(self.blank) < count:
            self._reclaim(count - len(self.blank))
        keep = len(self.blank) - count
        taken = self.blank[keep:]
        del self.blank[keep:]
        taken.reverse()
        return taken

    def drop(self, ids: BlockIds) -> None:
        """One holder lets go of these private blocks; those without another one are blank."""
        if not ids:
            return
        if not self.num_private_pins:
            self.blank.extend(ids)
            return
        which = np.frombuffer(ids, np.int32)
        left = np.maximum(self._holders[which] - 1, 0)
        self._holders[which] = left
        self.blank.frombytes(which[left == 0].tobytes())

    def hold(self, ids: BlockIds) -> None:
        """One more holder of these private blocks."""
        which = np.frombuffer(ids, np.int32)
        self._holders[which] = np.maximum(self._holders[which], 1) + 1

    def num_holders(self, block: int) -> int:
        """Holders of a private block."""
        return max(int(self._holders[block]), 1) if self.num_private_pins else 1

    def unhold(self, ids: BlockIds) -> None:
        """These were private and are published now: their segment counts who holds them."""
        if self.num_private_pins:
            self._holders[np.frombuffer(ids, np.int32)] = 0

    # ---------------------------------------------------------------- published blocks

    def publish(
        self,
        parent: Segment,
        tokens: bytearray,
        ids: BlockIds,
        retention: Retention,
        references: int,
        moment: int = 0,
        *,
        tail: bool = False,
    ) -> Segment:
        """Private blocks become published, after `parent`; returns the segment that holds them.

        Args:
            parent: has no child that begins with the same block.
            tokens: of these blocks.
            ids: of these blocks.
            retention: of these blocks.
            references: who holds them.
            moment: of letting go, if that is nobody.
            tail: it is one block that is not full.
        """
        if parent.ticket:
            self.queue.discard(parent)
        if references and not tail and self._continues(parent, retention, references):
            parent.tokens += tokens
            parent.ids.extend(ids)
            return parent
        segment = self._tree.insert(parent, tokens, ids)
        segment.retention = retention
        segment.references = references
        if references:
            self._published += 1
            segment.stamp = self._published
        else:
            self._become_unreferenced(segment, moment)
        return segment

    def next_moment(self) -> int:
        """A moment of letting go or use, later than all before."""
        self._now += 1
        return self._now

    def claim(self, segment: Segment) -> None:
        """One more holder of the whole path down to `segment`."""
        step: Segment | None = segment
        while step is not None and step.parent is not None:
            if step.references == 0:
                self.num_unreferenced -= len(step.ids)
                self.queue.discard(step)
            step.references += 1
            step = step.parent

    def let_go(self, segment: Segment | None, moment: int) -> None:
        """One holder less of the whole path down to `segment`, last block first."""
        step = segment
        while step is not None and step.parent is not None:
            step.references -= 1
            if step.references == 0:
                self._become_unreferenced(step, moment)
            else:
                step.stamp = moment
            step = step.parent

    def protect(self, segment: Segment) -> None:
        """Keep this one segment from being reclaimed until `used`."""
        if segment.references == 0:
            self.num_unreferenced -= len(segment.ids)
            self.queue.discard(segment)
        segment.references += 1

    def used(self, segment: Segment) -> None:
        """Ends `protect`: the segment was used just now."""
        segment.references -= 1
        if segment.references == 0:
            self._become_unreferenced(segment, self.next_moment())
        else:
            segment.stamp = self.next_moment()

    def take(self, segment: Segment) -> BlockIds:
        """Unpublish an unreferenced segment without children: its blocks are private now."""
        self.queue.discard(segment)
        self.num_unreferenced -= len(segment.ids)
        return self._cut(segment, len(segment.ids))

    def retain(self, segment: Segment, run: RetentionRun) -> None:
        """Overwrite the retention of those blocks of a referenced `segment` that are in `run`."""
        low, high = max(run.start, segment.start), min(run.stop, segment.end)
        unchanged = segment.retention == run.retention and segment.expires == inf
        if low >= high or unchanged:
            return
        target = segment if high == segment.end else self._tree.split(segment, high)
        if low > target.start:
            self._tree.split(target, low)
        target.retention = run.retention
        target.expires = inf

    def effective_retention(self, segment: Segment) -> Retention:
        """The retention of `segment`, or the default if its duration is over."""
        expired = segment.expires != inf and segment.expires <= self._clock()
        return DEFAULT_RETENTION if expired else segment.retention

    def effective_priority(self, segment: Segment) -> int:
        """The priority of `segment` now."""
        return effective_priority(segment, self._clock() if segment.expires != inf else 0.0)

    # ---------------------------------------------------------------- inside

    @staticmethod
    def _continues(parent: Segment, retention: Retention, references: int) -> bool:
        # Equal counts mean equal holders: whoever holds the new blocks holds those before them. A
        # child may be there although nobody let go: a duplicate's end was published under `parent`.
        return (
            parent.stamp < 0
            and parent.references == references
            and parent.retention == retention
            and not parent.children
        )

    def _become_unreferenced(self, segment: Segment, moment: int) -> None:
        segment.stamp = moment
        self.num_unreferenced += len(segment.ids)
        if segment.retention.duration is not None and segment.expires == inf:
            segment.expires = self._clock() + segment.retention.duration
        if segment.is_free_leaf:
            self.queue.add(segment)

    def _reclaim(self, count: int) -> None:
        # All blocks of a segment are next in order, last to first: nothing lies between them.
        segment = self.queue.first()
        count = min(count, len(segment.ids))
        if count == len(segment.ids):
            self.queue.discard(segment)
        self.num_unreferenced -= count
        self.blank.extend(self._cut(segment, count))

    def _cut(self, segment: Segment, count: int) -> BlockIds:
        whole = count == len(segment.ids)
        ids = self._tree.cut(segment, count)
        parent = segment.parent
        if whole and parent is not None and parent.is_free_leaf:
            self.queue.add(parent)
        return ids
