"""The published blocks of one pool: their holders and their retention."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from kvconnect.cache.pool.events import EventLog
from kvconnect.cache.pool.private_blocks import PrivateBlocks
from kvconnect.cache.pool.reclaim_queue import ReclaimQueue, effective_priority
from kvconnect.cache.tree.radix_tree import RadixTree
from kvconnect.cache.tree.retention import DEFAULT_RETENTION, Retention
from kvconnect.cache.tree.segment import BlockIds, Residence, Segment, new_ids

_NEVER_RELEASED = -(1 << 62)
"""The first stamp of published blocks that were never released; less than any moment of release."""


class PublishedBlocks:
    """The state of all segments in one pool; every change of that state is made here.

    With full attention, references cover whole paths from the root, so an unreferenced block never
    has a referenced descendant.

    Attributes:
        group: the number of the pool group, and the index of its state in every segment.
        window: the attention window in tokens; ``None`` for full attention.
        candidates: the segments that may leave a tier.
        num_unreferenced: how many blocks in primary have no holder.

    Args:
        private: the private blocks of the pool, which become published.
        events: records every change; ``None`` records nothing.
    """

    def __init__(
        self,
        group: int,
        window: int | None,
        tree: RadixTree,
        *,
        private: PrivateBlocks,
        clock: Callable[[], float],
        events: EventLog | None,
    ) -> None:
        self.group = group
        self.window = window
        self.candidates = _Candidates(group, window, clock)
        self.num_unreferenced = 0
        self._tree = tree
        self._private = private
        self._clock = clock
        self._events = events
        self._now = 0
        self._last_stamp = _NEVER_RELEASED
        tree.on_split.append(self._divided)
        tree.on_join.append(self.candidates.forget)

    # ---------------------------------------------------------------- publishing

    def publish(
        self, segment: Segment, ids: BlockIds, retention: Retention, references: int
    ) -> None:
        """Publishes private blocks as the blocks of `segment`, which is not resident here so far.

        Args:
            segment: a segment of the tree; with full attention, below primary blocks only.
            ids: one private block per block of `segment`.
            retention: the retention of these blocks.
            references: the number of their holders, at least one.
        """
        state = segment.pools[self.group]
        if segment.parent is not None:
            segment.parent.pools[self.group].resident_below += 1
        state.retention, state.expires = retention, inf
        self._last_stamp += 1
        state.stamp = self._last_stamp
        self._enter_primary(segment, state, ids, references)
        if self._events is not None:
            self._events.stored(self.group, segment)

    def extend(self, segment: Segment, ids: BlockIds) -> None:
        """Publishes private blocks `ids` as the last blocks of `segment`, which was lengthened.

        The blocks must have the same holders as `segment`.
        """
        state = segment.pools[self.group]
        if state.ids is not None:
            state.ids.extend(ids)
        self._private.published(ids)
        if self._events is not None:
            self._events.stored(self.group, segment, len(segment) - len(ids))

    def can_extend(self, segment: Segment, retention: Retention) -> bool:
        """Returns whether `extend` may add a sequence's blocks of `retention` to `segment`."""
        state = segment.pools[self.group]
        return (
            state.stamp < 0  # else the new blocks would get the segment's moment of release
            and state.references == 1
            and state.retention == retention
            and state.ids is not None
            and state.host_ids is None
        )

    def adopt(
        self, segment: Segment, ids: BlockIds, retention: Retention | None, references: int
    ) -> None:
        """Publishes private blocks as the primary copy of `segment`, which is in secondary only.

        `references` are added to the present ones. A `retention` of ``None`` keeps the present one.
        The host copy stays valid.
        """
        state = segment.pools[self.group]
        if retention is not None:
            self._set_retention(segment, retention)
        self._enter_primary(segment, state, ids, references)
        self.candidates.review(segment)
        if self._events is not None:
            self._events.moved(self.group, segment, to_primary=True)

    # ---------------------------------------------------------------- references

    def next_moment(self) -> int:
        """Returns a new moment of release or use, greater than all earlier ones."""
        self._now += 1
        return self._now

    def reference(self, segment: Segment) -> None:
        """Adds a holder to `segment` alone, not to its ancestors."""
        state = segment.pools[self.group]
        if state.references == 0:
            if state.ids is not None:
                self.num_unreferenced -= len(state.ids)
                self.candidates.primary.discard(segment)
            else:
                self.candidates.sole.discard(segment)
        state.references += 1

    def dereference(self, segment: Segment, moment: int) -> None:
        """Removes a holder from `segment` alone; `moment` is the time of its last use."""
        state = segment.pools[self.group]
        state.references -= 1
        state.stamp = moment
        if not self.group:
            self._tree.let_go(segment)
        if state.references == 0:
            if state.retention.duration is not None and state.expires == inf:
                state.expires = self._clock() + state.retention.duration
            if state.ids is not None:
                self.num_unreferenced += len(state.ids)
            self.candidates.review(segment)
        elif state.host_ids is not None:
            self.candidates.review(segment)

    # ---------------------------------------------------------------- retention

    def differs(self, segment: Segment, retention: Retention) -> bool:
        """Returns whether `retain` with `retention` would change `segment`."""
        state = segment.pools[self.group]
        return state.retention != retention or state.expires != inf

    def retain(self, segment: Segment, retention: Retention) -> None:
        """Overwrites the retention of a referenced `segment`."""
        self._set_retention(segment, retention)
        self.candidates.review(segment)

    def effective_retention(self, segment: Segment) -> Retention:
        """Returns the retention of `segment`, or the default one after its duration."""
        state = segment.pools[self.group]
        expired = state.expires != inf and state.expires <= self._clock()
        return DEFAULT_RETENTION if expired else state.retention

    def effective_priority(self, segment: Segment) -> int:
        """Returns the priority of `segment`, or the default one after its duration."""
        state = segment.pools[self.group]
        return effective_priority(state, self._clock() if state.expires != inf else 0.0)

    # ---------------------------------------------------------------- leaving

    def evict(self, segment: Segment) -> BlockIds:
        """Evicts `segment`, which has a host copy and no holder, from primary.

        Returns its primary blocks, which are no longer used.
        """
        ids = self._leave_primary(segment)
        self.candidates.review(segment)
        if self._events is not None:
            self._events.moved(self.group, segment, to_primary=False)
        self._tree.join(segment)  # else a long segment would become many short ones
        return ids

    def remove(self, segment: Segment) -> BlockIds:
        """Removes `segment`, which has no holder and no host copy, from this pool.

        Returns its primary blocks. The tree drops `segment` if no pool has it and no child is left.
        """
        if self._events is not None:
            self._events.removed(self.group, segment)
        ids = self._leave_primary(segment)
        self.candidates.primary.discard(segment)
        if segment.parent is not None:
            above = segment.parent.pools[self.group]
            above.resident_below -= 1
            if self.window is None and above.host_ids is not None and above.ids is None:
                self.candidates.review(segment.parent)
        self._tree.prune(segment)
        return ids

    def cut(self, segment: Segment, count: int) -> BlockIds:
        """Removes the last `count` blocks of `segment`, which no other pool or tier has.

        Returns their ids.
        """
        if self._events is not None:
            self._events.removed(self.group, segment, len(segment) - count)
        state = segment.pools[self.group]
        self.num_unreferenced -= count
        ids = new_ids()
        if state.ids is not None:
            ids = state.ids[-count:]
            del state.ids[-count:]
        self._tree.shorten(segment, count)
        return ids

    def lose_copy(self, segment: Segment) -> BlockIds:
        """Removes the host copy of `segment`; returns its host blocks, empty if it had none."""
        state = segment.pools[self.group]
        ids, state.host_ids = state.host_ids, None
        self.candidates.without_copy(segment)
        return ids if ids is not None else new_ids()

    def clear(self) -> None:
        """Removes all candidates. The caller clears the tree afterwards."""
        self.candidates.clear()
        self.num_unreferenced = 0

    # ---------------------------------------------------------------- inside

    def _enter_primary(
        self, segment: Segment, state: Residence, ids: BlockIds, references: int
    ) -> None:
        state.ids = ids
        state.references += references
        self._private.published(ids)
        if segment.parent is not None:
            above = segment.parent.pools[self.group]
            above.primary_below += 1
            if self.window is None and above.ids is not None:
                self.candidates.primary.discard(segment.parent)

    def _leave_primary(self, segment: Segment) -> BlockIds:
        state = segment.pools[self.group]
        if state.ids is None:
            return new_ids()
        ids, state.ids = state.ids, None
        self.num_unreferenced -= len(ids)
        if segment.parent is not None:
            above = segment.parent.pools[self.group]
            above.primary_below -= 1
            free_leaf = above.references == 0 and not above.primary_below
            if free_leaf and self.window is None and above.ids is not None:
                self.candidates.review(segment.parent)
        return ids

    def _set_retention(self, segment: Segment, retention: Retention) -> None:
        state = segment.pools[self.group]
        if self._events is not None and state.retention.priority != retention.priority:
            self._events.reprioritised(self.group, segment, retention.priority)
        state.retention, state.expires = retention, inf

    def _divided(self, upper: Segment, lower: Segment) -> None:
        # The tree split a segment; `lower` is the object that was one of the candidates.
        upper.pools[self.group] = lower.pools[self.group].divide(len(upper))
        self.candidates.divided(upper, lower)


class _Candidates:
    """The segments that may leave a tier of one pool, each queue in the order of reclaiming.

    With full attention a segment may leave a tier only if it has no children there. In a window
    pool every segment is a candidate by itself.

    Attributes:
        primary: segments in primary that have no holder.
        redundant: segments with a host copy that are in primary, too, held or not. Their host copy
            can be dropped without a loss.
        sole: segments without a holder whose only copy is the one on the host.
    """

    def __init__(self, group: int, window: int | None, clock: Callable[[], float]) -> None:
        self.primary = ReclaimQueue(group, clock)
        self.redundant = ReclaimQueue(group, clock)
        self.sole = ReclaimQueue(group, clock)
        self._group = group
        self._leaves_only = window is None
        everything = (self.primary, self.redundant, self.sole)
        # The queues in which both parts of a divided candidate are candidates.
        self._any_part = (self.redundant,) if self._leaves_only else everything

    def review(self, segment: Segment) -> None:
        """Updates the queues after the state of `segment` changed."""
        state = segment.pools[self._group]
        if state.ids is None or state.references or (self._leaves_only and state.primary_below):
            self.primary.discard(segment)
        else:
            self.primary.add(segment)
        if state.host_ids is None:
            return  # the case of `without_copy`
        if state.ids is not None:
            self.redundant.add(segment)
            self.sole.discard(segment)
            return
        self.redundant.discard(segment)
        if state.references or (self._leaves_only and state.resident_below):
            self.sole.discard(segment)
        else:
            self.sole.add(segment)

    def without_copy(self, segment: Segment) -> None:
        """Updates the queues after the host copy of `segment` was removed."""
        self.redundant.discard(segment)
        self.sole.discard(segment)

    def divided(self, upper: Segment, lower: Segment) -> None:
        """Updates the queues after `upper` was split off `lower`, which was the whole segment."""
        if self._leaves_only and lower.pools[self._group].host_ids is None:
            return  # in primary memory, the lower part alone is the leaf
        for queue in self._any_part:
            if lower in queue:
                # At the whole segment's position it would be reclaimed after parts split off later.
                queue.add(upper)
                queue.add(lower)

    def forget(self, segment: Segment) -> None:
        """Removes `segment` from all queues."""
        self.primary.discard(segment)
        self.without_copy(segment)

    def clear(self) -> None:
        """Removes all segments."""
        self.primary.clear()
        self.redundant.clear()
        self.sole.clear()
