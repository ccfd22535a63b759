"""The order in which published blocks are given up."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf

from kvconnect.cache.retention import DEFAULT_RETENTION
from kvconnect.cache.segment import Segment

__all__ = ["ReclaimQueue", "effective_priority"]


def effective_priority(segment: Segment, now: float) -> int:
    """The priority of its blocks at time `now`: the default once their duration is over."""
    if segment.expires <= now:
        return DEFAULT_RETENTION.priority
    return segment.retention.priority


class ReclaimQueue:
    """Candidates for reclaim: lowest effective priority first, then least recently used.

    A candidate is a segment whose last block may go. What stops being one is not searched for: its
    ticket becomes 0, and its entry is skipped when it comes up.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._order: list[tuple[int, int, int, Segment]] = []
        self._expiring: list[tuple[float, int, Segment]] = []
        self._last_ticket = 0
        self._size = 0

    def __len__(self) -> int:
        """Candidates."""
        return self._size

    @property
    def num_entries(self) -> int:
        """Entries, with those that are no longer valid."""
        return len(self._order) + len(self._expiring)

    def add(self, segment: Segment) -> None:
        """`segment` is a candidate from now on, with the state that it has now."""
        self._size += 1
        self._push(segment)
        if len(self._order) + len(self._expiring) > 64 + 8 * self._size:
            self._compact()

    def discard(self, segment: Segment) -> None:
        """`segment` is no candidate any more, if it was one."""
        if segment.ticket:
            segment.ticket = 0
            self._size -= 1

    def first(self) -> Segment:
        """The candidate whose last block goes next. It stays one; there must be one."""
        if self._expiring:
            self._revert()
        while True:
            _, _, ticket, segment = self._order[0]
            if segment.ticket == ticket:
                return segment
            heapq.heappop(self._order)

    def clear(self) -> None:
        """Forget all candidates; their tickets mean nothing any more."""
        self._order.clear()
        self._expiring.clear()
        self._size = 0

    def _push(self, segment: Segment) -> None:
        self._last_ticket += 1
        segment.ticket = ticket = self._last_ticket
        if segment.expires == inf:
            heapq.heappush(
                self._order, (segment.retention.priority, segment.stamp, ticket, segment)
            )
            return
        now = self._clock()
        priority = effective_priority(segment, now)
        heapq.heappush(self._order, (priority, segment.stamp, ticket, segment))
        if segment.expires > now:
            heapq.heappush(self._expiring, (segment.expires, ticket, segment))

    def _revert(self) -> None:
        now = self._clock()
        while self._expiring and self._expiring[0][0] <= now:
            _, ticket, segment = heapq.heappop(self._expiring)
            if segment.ticket == ticket:
                self._push(segment)

    def _compact(self) -> None:
        self._order = [entry for entry in self._order if entry[3].ticket == entry[2]]
        self._expiring = [entry for entry in self._expiring if entry[2].ticket == entry[1]]
        heapq.heapify(self._order)
        heapq.heapify(self._expiring)
