"""The primary blocks of one pool: which are blank, which are held, which may be reclaimed."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from kvconnect.cache.radix_tree import RadixTree
from kvconnect.cache.reclaim_queue import ReclaimQueue, effective_priority
from kvconnect.cache.retention import DEFAULT_RETENTION, Retention
from kvconnect.cache.segment import BlockIds, Residence, Segment, new_ids
from kvconnect.errors import OutOfBlocks

if TYPE_CHECKING:
    from kvconnect.cache.events import EventLog
    from kvconnect.cache.host_tier import HostTier

__all__ = ["BlockPool"]

_NEVER_LET_GO = -(1 << 62)
"""Stamps from here on count publishing; all are older than any moment of letting go."""


class BlockPool:
    """Allocates, references and reclaims the blocks of one pool group.

    Every block is in one of four states: blank; private (of a sequence or a pin, not in the tree);
    published and referenced; published and unreferenced. With full attention, references cover
    whole paths from the root, so an unreferenced block never has a referenced descendant, and every
    unreferenced block can be reclaimed by taking the tree apart from its leaves. In a window pool
    every unreferenced block is a candidate by itself.

    Attributes:
        group: its number, and the place of its state in every segment.
        window: attention window in tokens; ``None``: full attention.
        ids: the numbers of its blocks.
        blank: ids whose content nobody can find.
        num_unreferenced: published ones in primary that nobody holds.
        num_reclaimed: published ones that had to leave primary so far.
        host: the secondary tier; ``None``: reclaimed blocks are dropped.
    """

    def __init__(
        self,
        group: int,
        window: int | None,
        ids: Iterable[int],
        tree: RadixTree,
        clock: Callable[[], float],
        events: EventLog | None = None,
    ) -> None:
        self.group = group
        self.window = window
        self.queue = ReclaimQueue(group, clock)
        self.num_unreferenced = 0
        self.num_reclaimed = 0
        self.host: HostTier | None = None
        self.events = events
        self._tree = tree
        self._clock = clock
        self._now = 0
        self._published = _NEVER_LET_GO
        self.blank: BlockIds = array("i", ids)
        self.blank.reverse()
        self.num_blocks = len(self.blank)
        # Holders of private blocks, counted only while pins hold some: 0 and 1 both mean one
        # holder.
        self._holders = np.zeros(max(self.blank, default=-1) + 1, np.int32)
        self.num_private_pins = 0
        tree.on_split.append(self._divided)
        tree.on_join.append(self._absorbed)

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self.blank) + self.num_unreferenced

    def reset(self) -> None:
        """All blocks become blank; the caller empties the tree, and nothing is held."""
        for segment in self._tree.segments():
            ids = segment.pools[self.group].ids
            if ids is not None:
                self.blank.extend(ids)
        self.queue.clear()
        self.num_unreferenced = 0
        if self.host is not None:
            self.host.reset(self._tree.segments())

    def grow(self, ids: range) -> None:
        """Memory came from another pool: these blocks are ours now, and blank."""
        self.num_blocks += len(ids)
        self.blank.extend(reversed(ids))
        missing = max(ids) + 1 - len(self._holders)
        if missing > 0:
            self._holders = np.pad(self._holders, (0, missing))

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
        self.make_blank(count)
        keep = len(self.blank) - count
        taken = self.blank[keep:]
        del self.blank[keep:]
        taken.reverse()
        return taken

    def make_blank(self, count: int) -> None:
        """Reclaim published blocks until `count` are blank; so many must be free."""
        num_blank = len(self.blank)
        while len(self.blank) < count:
            self._reclaim(count - len(self.blank))
        self.num_reclaimed += len(self.blank) - num_blank

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
        if not ids:
            return
        which = np.frombuffer(ids, np.int32)
        self._holders[which] = np.maximum(self._holders[which], 1) + 1

    def num_holders(self, block: int) -> int:
        """Holders of a private block."""
        return max(int(self._holders[block]), 1) if self.num_private_pins else 1

    # ---------------------------------------------------------------- publishing

    def publish(
        self, segment: Segment, ids: BlockIds, retention: Retention, references: int
    ) -> None:
        """Private blocks become the blocks of `segment`, which is not resident here so far.

        Args:
            segment: in the tree; with full attention, below primary blocks only.
            ids: one per block of it.
            retention: of these blocks.
            references: how many hold them, at least one.
        """
        state = segment.pools[self.group]
        if segment.parent is not None:
            segment.parent.pools[self.group].resident_below += 1
        state.retention, state.expires = retention, inf
        self._published += 1
        state.stamp = self._published
        self._enter_primary(segment, state, ids, references)
        if self.events is not None:
            self.events.stored(self, segment)

    def extend(self, segment: Segment, ids: BlockIds) -> None:
        """`segment`, whose holders hold these private blocks too, grew by them at its end."""
        state = segment.pools[self.group]
        if state.ids is not None:
            state.ids.extend(ids)
        if self.num_private_pins:
            self._unhold(ids)
        if self.events is not None:
            self.events.stored(self, segment, len(segment) - len(ids))

    def can_extend(self, segment: Segment, retention: Retention) -> bool:
        """Whether blocks of this retention that one sequence holds may join `segment`."""
        state = segment.pools[self.group]
        return (
            state.stamp < 0  # else new blocks would seem to have been let go before
            and state.references == 1
            and state.retention == retention
            and state.ids is not None
            and state.host_ids is None
        )

    def adopt(
        self, segment: Segment, ids: BlockIds, retention: Retention | None, references: int
    ) -> None:
        """Private blocks become the primary copy of `segment`, which is in secondary only.

        As `publish`, but `references` are those that come to what it has, and a `retention` of
        ``None`` leaves that alone. The host copy stays valid.
        """
        state = segment.pools[self.group]
        if self.host is not None:
            self.host.sole.discard(segment)
        if retention is not None:
            self._set_retention(segment, retention)
        self._enter_primary(segment, state, ids, references)
        if self.host is not None:
            self.host.redundant.add(segment)
        if self.events is not None:
            self.events.moved(self, segment, to_primary=True)

    # ---------------------------------------------------------------- references

    def next_moment(self) -> int:
        """A moment of letting go or use, later than all before."""
        self._now += 1
        return self._now

    def reference(self, segment: Segment) -> None:
        """One more holder of this one segment."""
        state = segment.pools[self.group]
        if state.references == 0:
            if state.ids is not None:
                self.num_unreferenced -= len(state.ids)
                self.queue.discard(segment)
            elif self.host is not None:
                self.host.sole.discard(segment)
        state.references += 1

    def dereference(self, segment: Segment, moment: int) -> None:
        """One holder less of this one segment, which was used until `moment`."""
        state = segment.pools[self.group]
        state.references -= 1
        state.stamp = moment
        if not self.group:
            self._tree.let_go(segment)
        if state.references == 0:
            self._become_unreferenced(segment, state)
        elif state.host_ids is not None:
            self._requeue_copy(segment, state)

    def take(self, segment: Segment) -> BlockIds:
        """Unpublish a segment that nothing follows and only the caller holds.

        Its primary blocks, if it has some, are private now; a host copy becomes blank.
        """
        state = segment.pools[self.group]
        state.references = 0
        ids = new_ids()
        if state.ids is not None:
            self.num_unreferenced += len(segment)
            ids = self._leave_primary(segment)
        if self.host is not None:
            self.host.release(segment)
        self._leave_pool(segment)
        return ids

    # ---------------------------------------------------------------- retention

    def differs(self, segment: Segment, retention: Retention) -> bool:
        """Whether setting `retention` would change anything."""
        state = segment.pools[self.group]
        return state.retention != retention or state.expires != inf

    def retain(self, segment: Segment, retention: Retention) -> None:
        """Overwrite the retention of a referenced `segment`."""
        self._set_retention(segment, retention)
        state = segment.pools[self.group]
        if state.ids is not None and state.host_ids is not None:
            self._requeue_copy(segment, state)

    def effective_retention(self, segment: Segment) -> Retention:
        """The retention of `segment`, or the default if its duration is over."""
        state = segment.pools[self.group]
        expired = state.expires != inf and state.expires <= self._clock()
        return DEFAULT_RETENTION if expired else state.retention

    def effective_priority(self, segment: Segment) -> int:
        """The priority of `segment` now."""
        state = segment.pools[self.group]
        return effective_priority(state, self._clock() if state.expires != inf else 0.0)

    # ---------------------------------------------------------------- inside: states

    def _enter_primary(
        self, segment: Segment, state: Residence, ids: BlockIds, references: int
    ) -> None:
        state.ids = ids
        state.references += references
        if self.num_private_pins:
            self._unhold(ids)
        parent = segment.parent
        if parent is not None:
            parent.pools[self.group].primary_below += 1
            if self.window is None:
                self.queue.discard(parent)
                if self.host is not None:
                    self.host.sole.discard(parent)

    def _unhold(self, ids: BlockIds) -> None:
        # These were private and are published now: their segment counts who holds them.
        self._holders[np.frombuffer(ids, np.int32)] = 0

    def _become_unreferenced(self, segment: Segment, state: Residence) -> None:
        if state.retention.duration is not None and state.expires == inf:
            state.expires = self._clock() + state.retention.duration
        if state.ids is not None:
            self.num_unreferenced += len(state.ids)
            self._offer(segment)
        if state.host_ids is not None:
            self._requeue_copy(segment, state)

    def _offer(self, segment: Segment) -> None:
        # Put an unreferenced segment in primary into the queue if it is a candidate.
        if self.window is not None or not segment.pools[self.group].primary_below:
            self.queue.add(segment)

    def _requeue_copy(self, segment: Segment, state: Residence) -> None:
        if self.host is None:
            return
        if state.ids is not None:
            self.host.redundant.add(segment)
        elif state.references == 0 and (self.window is not None or not state.resident_below):
            self.host.sole.add(segment)

    def _set_retention(self, segment: Segment, retention: Retention) -> None:
        state = segment.pools[self.group]
        if self.events is not None and state.retention.priority != retention.priority:
            self.events.reprioritised(self, segment, retention.priority)
        state.retention, state.expires = retention, inf

    def _divided(self, upper: Segment, lower: Segment) -> None:
        # The tree split a segment; `lower` is the object that was in the queues.
        state = lower.pools[self.group]
        upper.pools[self.group] = state.divide(len(upper))
        if self.window is not None and lower in self.queue:
            self.queue.add(upper)
            self.queue.add(lower)
        if self.host is None or state.host_ids is None:
            return
        if lower in self.host.redundant:
            self.host.redundant.add(upper)
            self.host.redundant.add(lower)
        elif self.window is not None and lower in self.host.sole:
            self.host.sole.add(upper)
            self.host.sole.add(lower)

    def _absorbed(self, upper: Segment) -> None:
        # The tree undid a division; the lower part stands in the queues for both.
        self.queue.discard(upper)
        if self.host is not None:
            self.host.redundant.discard(upper)
            self.host.sole.discard(upper)

    # ---------------------------------------------------------------- inside: reclaim

    def _reclaim(self, count: int) -> None:
        # All blocks of a segment are next in order, last to first: nothing lies between them.
        segment = self.queue.first()
        count = min(count, segment.end - segment.start)
        host = self.host
        if host is not None and segment.pools[self.group].host_ids is not None:
            self._evict(host, self._tail_part(segment, count))
        elif host is None or not self._offload(host, segment, count):
            self._drop(segment, count)

    def _offload(self, host: HostTier, segment: Segment, count: int) -> bool:
        # Move some of the last `count` blocks to the host; False: not even the last one may go.
        if self.effective_priority(segment) < host.min_priority:
            return False
        host_ids = host.make_room(self.queue.order_of(segment), count)
        if not host_ids:
            return False
        part = self._tail_part(segment, len(host_ids))
        host.copy_in(part, host_ids)
        self._evict(host, part)
        return True

    def _evict(self, host: HostTier, segment: Segment) -> None:
        # The host copy is all that is left.
        self.blank.extend(self._leave_primary(segment))
        host.redundant.discard(segment)
        if self.window is not None or not segment.pools[self.group].resident_below:
            host.sole.add(segment)
        if self.events is not None:
            self.events.moved(self, segment, to_primary=False)
        self._tree.join(segment)  # else a long run would end as many short ones

    def _drop(self, segment: Segment, count: int) -> None:
        if self.window is None and segment.pools[self.group].resident_below:
            # What is in secondary below the last block could not be reached without it. That makes
            # room there, perhaps for the block before it.
            self._drop_descendants(segment)
            count = 1
        elif count < len(segment) and len(segment.pools) == 1 and not segment.children:
            self._cut(segment, count)
            return
        part = self._tail_part(segment, count)
        self.blank.extend(self._leave_primary(part))
        self._leave_pool(part)

    def _cut(self, segment: Segment, count: int) -> None:
        # As `_drop`, without dividing the segment first: nothing else is in it or below it.
        if self.events is not None:
            self.events.removed(self, segment, len(segment) - count)
        state = segment.pools[self.group]
        self.num_unreferenced -= count
        if state.ids is not None:
            self.blank.extend(state.ids[-count:])
            del state.ids[-count:]
        self._tree.shorten(segment, count)

    def _drop_descendants(self, segment: Segment) -> None:
        waiting = list(segment.children.values())
        gone = []
        while waiting:
            below = waiting.pop()
            if below.pools[self.group].host_ids is not None:
                gone.append(below)
                waiting.extend(below.children.values())
        for below in reversed(gone):
            if self.host is not None:
                self.host.release(below)
            self._leave_pool(below)

    def _tail_part(self, segment: Segment, count: int) -> Segment:
        # The segment of just the last `count` blocks.
        if count < len(segment):
            self._tree.split(segment, segment.end - count)
        return segment

    def _leave_primary(self, segment: Segment) -> BlockIds:
        # An unreferenced segment gives up its primary blocks.
        state = segment.pools[self.group]
        ids, state.ids = state.ids or new_ids(), None
        self.queue.discard(segment)
        self.num_unreferenced -= len(ids)
        if segment.parent is not None:
            above = segment.parent.pools[self.group]
            above.primary_below -= 1
            free_leaf = above.references == 0 and above.ids is not None
            if self.window is None and free_leaf and not above.primary_below:
                self.queue.add(segment.parent)
        return ids

    def lost_copy(self, segment: Segment) -> None:
        """The host took the only copy of `segment` away."""
        self._leave_pool(segment)

    def _leave_pool(self, segment: Segment) -> None:
        # Nothing of the segment is resident here any more.
        if self.events is not None:
            self.events.removed(self, segment)
        if segment.parent is not None:
            above = segment.parent.pools[self.group]
            above.resident_below -= 1
            if self.host is not None and self.window is None and not above.resident_below:
                only_copy = above.host_ids is not None and above.ids is None
                if only_copy and above.references == 0:
                    self.host.sole.add(segment.parent)
        self._tree.prune(segment)
