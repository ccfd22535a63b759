"""A thread of its own that fails pulls at their deadline, even if a transport hangs."""

from __future__ import annotations

import heapq
import itertools
import threading
import time

from kvconnect.errors import PullFailed
from kvconnect.transfer.leases.timer import Timer
from kvconnect.transfer.pull import Pull


class Deadlines:
    """Fails every watched pull that is not done at its deadline. Its thread sleeps in between."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heap: list[tuple[float, int]] = []
        self._pulls: dict[int, tuple[Pull, float]] = {}
        self._numbers = itertools.count()
        self._timer = Timer("kvconnect-deadlines", self._fail_late, time.monotonic)

    def watch(self, pull: Pull, seconds: float) -> None:
        """Fails `pull` after `seconds` unless it is done by then. Never blocks."""
        at = time.monotonic() + seconds
        with self._lock:
            number = next(self._numbers)
            self._pulls[number] = (pull, seconds)
            heapq.heappush(self._heap, (at, number))
            is_next = self._heap[0][1] == number
        if is_next:
            self._timer.wake()
        pull.done.add_done_callback(lambda _: self._forget(number))

    def close(self) -> None:
        """Ends the thread. Remaining pulls are no longer watched."""
        self._timer.close()

    def _forget(self, number: int) -> None:
        with self._lock:
            self._pulls.pop(number, None)
            # A pull's entry stays until its time, or until most entries are of pulls that are done.
            if len(self._heap) > 2 * len(self._pulls) + 64:
                self._heap = [entry for entry in self._heap if entry[1] in self._pulls]
                heapq.heapify(self._heap)

    def _fail_late(self) -> float | None:
        """Fails the pulls whose deadline has passed; returns the next deadline."""
        while True:
            with self._lock:
                if not self._heap:
                    return None
                if self._heap[0][0] > time.monotonic():
                    return self._heap[0][0]
                late = self._pulls.pop(heapq.heappop(self._heap)[1], None)
            if late is not None:
                pull, seconds = late
                pull.fail(PullFailed("deadline", f"the peer did not deliver within {seconds:g} s"))
