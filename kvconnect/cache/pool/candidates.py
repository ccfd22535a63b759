"""Selects the segments that may leave a tier of a pool."""

from __future__ import annotations

from collections.abc import Callable

from kvconnect.cache.pool.reclaim_queue import ReclaimQueue
from kvconnect.cache.tree.segment import Segment

__all__ = ["Candidates"]


class Candidates:
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
