"""The order in which published blocks are reclaimed."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from math import inf

from kvconnect.cache.tree.segment import Residence, Segment
from kvconnect.config import DEFAULT_RETENTION_PRIORITY

ReclaimOrder = tuple[int, int, int]
"""Effective priority, stamp, and minus the first block: the smallest is reclaimed first."""

_Entry = tuple[int, int, int, int, Segment]
"""The order, a ticket, and the segment."""


def effective_priority(state: Residence, now: float) -> int:
    """Returns the priority at time `now`: the default once the duration of `state` is over."""
    if state.expires <= now:
        return DEFAULT_RETENTION_PRIORITY
    return state.retention.priority


class ReclaimQueue:
    """The candidates of one pool: lowest effective priority first, then least recently used.

    A candidate is a segment whose last block may be reclaimed. To remove a candidate only voids its
    ticket; its entry is skipped when it comes first. Most candidates have the default priority and
    are released in order: these are in a deque, and only the others need a heap.
    """

    def __init__(self, group: int, clock: Callable[[], float]) -> None:
        self._group = group
        self._clock = clock
        self._tickets: dict[Segment, int] = {}
        self._line: deque[_Entry] = deque()
        self._heap: list[_Entry] = []
        self._expiring: list[tuple[float, int, Segment]] = []
        self._last_ticket = 0

    def __len__(self) -> int:
        """Returns the number of candidates."""
        return len(self._tickets)

    def __contains__(self, segment: Segment) -> bool:
        return segment in self._tickets

    def add(self, segment: Segment) -> None:
        """Makes `segment` a candidate, or updates its position, by its present state."""
        self._last_ticket += 1
        self._tickets[segment] = ticket = self._last_ticket
        state = segment.pools[self._group]
        priority = state.retention.priority
        if state.expires != inf:
            now = self._clock()
            priority = effective_priority(state, now)
            if state.expires > now:
                heapq.heappush(self._expiring, (state.expires, ticket, segment))
        entry = (priority, state.stamp, -segment.start, ticket, segment)
        line = self._line
        if priority == DEFAULT_RETENTION_PRIORITY and (not line or line[-1] < entry):
            line.append(entry)
        else:
            heapq.heappush(self._heap, entry)
        if len(line) + len(self._heap) + len(self._expiring) > 64 + 8 * len(self._tickets):
            self._compact()

    def discard(self, segment: Segment) -> None:
        """Removes `segment` from the candidates, if it is one."""
        self._tickets.pop(segment, None)

    def first(self) -> Segment:
        """Returns the candidate whose last block is reclaimed next, without removing it.

        There must be a candidate.
        """
        if self._expiring:
            self._revert()
        line, heap = self._line, self._heap
        while True:
            from_heap = heap and (not line or heap[0] < line[0])
            entry = heap[0] if from_heap else line[0]
            if self._tickets.get(entry[4]) == entry[3]:
                return entry[4]
            if from_heap:
                heapq.heappop(heap)
            else:
                line.popleft()

    def order_of(self, segment: Segment) -> ReclaimOrder:
        """Returns the order that the present state of `segment` gives, candidate or not."""
        state = segment.pools[self._group]
        return (effective_priority(state, self._clock()), state.stamp, -segment.start)

    def clear(self) -> None:
        """Removes all candidates."""
        self._tickets.clear()
        self._line.clear()
        self._heap.clear()
        self._expiring.clear()

    def _revert(self) -> None:
        now = self._clock()
        while self._expiring and self._expiring[0][0] <= now:
            _, ticket, segment = heapq.heappop(self._expiring)
            if self._tickets.get(segment) == ticket:
                self.add(segment)

    def _compact(self) -> None:
        valid = self._tickets.get
        self._line = deque(entry for entry in self._line if valid(entry[4]) == entry[3])
        self._heap = [entry for entry in self._heap if valid(entry[4]) == entry[3]]
        self._expiring = [entry for entry in self._expiring if valid(entry[2]) == entry[1]]
        heapq.heapify(self._heap)
        heapq.heapify(self._expiring)
