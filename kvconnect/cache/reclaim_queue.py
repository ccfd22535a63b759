"""The order in which published blocks are given up."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf

from kvconnect.cache.retention import DEFAULT_RETENTION
from kvconnect.cache.segment import Residence, Segment

__all__ = ["ReclaimOrder", "ReclaimQueue", "effective_priority"]

ReclaimOrder = tuple[int, int, int]
"""Effective priority, then stamp, then the later block of a path: the smallest goes first."""


def effective_priority(state: Residence, now: float) -> int:
    """The priority of its blocks at time `now`: the default once their duration is over."""
    if state.expires <= now:
        return DEFAULT_RETENTION.priority
    return state.retention.priority


class ReclaimQueue:
    """Candidates of one pool: lowest effective priority first, then least recently used.

    A candidate is a segment whose last block may go. What stops being one is not searched for in
    the heap: its ticket is void, and the entry is skipped when it comes up.
    """

    def __init__(self, group: int, clock: Callable[[], float]) -> None:
        self._group = group
        self._clock = clock
        self._tickets: dict[Segment, int] = {}
        self._order: list[tuple[int, int, int, int, Segment]] = []
        self._expiring: list[tuple[float, int, Segment]] = []
        self._last_ticket = 0

    def __len__(self) -> int:
        """Candidates."""
        return len(self._tickets)

    def __contains__(self, segment: Segment) -> bool:
        return segment in self._tickets

    @property
    def num_entries(self) -> int:
        """Entries, with those that are no longer valid."""
        return len(self._order) + len(self._expiring)

    def add(self, segment: Segment) -> None:
        """`segment` is a candidate from now on, in the place that its state gives it now."""
        self._last_ticket += 1
        self._tickets[segment] = ticket = self._last_ticket
        state = segment.pools[self._group]
        priority = state.retention.priority
        if state.expires != inf:
            now = self._clock()
            priority = effective_priority(state, now)
            if state.expires > now:
                heapq.heappush(self._expiring, (state.expires, ticket, segment))
        heapq.heappush(self._order, (priority, state.stamp, -segment.start, ticket, segment))
        if len(self._order) + len(self._expiring) > 64 + 8 * len(self._tickets):
            self._compact()

    def discard(self, segment: Segment) -> None:
        """`segment` is no candidate any more, if it was one."""
        self._tickets.pop(segment, None)

    def first(self) -> Segment:
        """The candidate whose last block goes next. It stays one; there must be one."""
        if self._expiring:
            self._revert()
        while True:
            entry = self._order[0]
            if self._tickets.get(entry[4]) == entry[3]:
                return entry[4]
            heapq.heappop(self._order)

    def order_of(self, segment: Segment) -> ReclaimOrder:
        """Where a segment in this state stands, candidate or not."""
        state = segment.pools[self._group]
        return (effective_priority(state, self._clock()), state.stamp, -segment.start)

    def clear(self) -> None:
        """Forget all candidates."""
        self._tickets.clear()
        self._order.clear()
        self._expiring.clear()

    def _revert(self) -> None:
        now = self._clock()
        while self._expiring and self._expiring[0][0] <= now:
            _, ticket, segment = heapq.heappop(self._expiring)
            if self._tickets.get(segment) == ticket:
                self.add(segment)

    def _compact(self) -> None:
        valid = self._tickets.get
        self._order = [entry for entry in self._order if valid(entry[4]) == entry[3]]
        self._expiring = [entry for entry in self._expiring if valid(entry[2]) == entry[1]]
        heapq.heapify(self._order)
        heapq.heapify(self._expiring)
