"""Which segments may leave which tier of a pool."""

from __future__ import annotations

from collections.abc import Callable

from kvconnect.cache.pool.reclaim_queue import ReclaimQueue
from kvconnect.cache.tree.segment import Segment

__all__ = ["Candidates"]


class Candidates:
    """What may be given up in one pool, in order (specification: reclaiming primary blocks).

    With full attention a tier is taken apart from its leaves: what something follows there stays.
    In a window pool every segment is a candidate by itself.

    Attributes:
        primary: segments in primary that have no holder.
        redundant: segments with a host copy that are in primary, too, held or not: with that
            copy nothing is lost.
        sole: segments whose host copy is the only one, and that have no holder.
    """

    def __init__(self, group: int, window: int | None, clock: Callable[[], float]) -> None:
        self.primary = ReclaimQueue(group, clock)
        self.redundant = ReclaimQueue(group, clock)
        self.sole = ReclaimQueue(group, clock)
        self._group = group
        self._leaves_only = window is None
        everything = (self.primary, self.redundant, self.sole)
        # Where both parts of a candidate that is divided are candidates.
        self._any_part = (self.redundant,) if self._leaves_only else everything

    def review(self, segment: Segment) -> None:
        """The state of `segment` changed: it is a candidate, and in which order, as that says."""
        state = segment.pools[self._group]
        if state.ids is None or state.references or (self._leaves_only and state.primary_below):
            self.primary.discard(segment)
        else:
            self.primary.add(segment)
        if state.host_ids is None:
            return  # see `without_copy`
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
        """`segment` has no host copy any more."""
        self.redundant.discard(segment)
        self.sole.discard(segment)

    def divided(self, upper: Segment, lower: Segment) -> None:
        """`upper` was split off `lower`, which stands where the whole stood."""
        if self._leaves_only and lower.pools[self._group].host_ids is None:
            return  # of primary, the lower part alone is the leaf
        for queue in self._any_part:
            if lower in queue:
                # Where the whole stood it would go after what is split off it later.
                queue.add(upper)
                queue.add(lower)

    def forget(self, segment: Segment) -> None:
        """`segment` is gone."""
        self.primary.discard(segment)
        self.without_copy(segment)

    def clear(self) -> None:
        """Everything is gone."""
        self.primary.clear()
        self.redundant.clear()
        self.sole.clear()
