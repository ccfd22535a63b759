"""A thread that fails pulls at their deadline, whatever else hangs."""

from __future__ import annotations

import heapq
import itertools
import threading
import time

from kvconnect.errors import PullFailed
from kvconnect.transfer.pull import Pull

__all__ = ["Deadlines"]


class Deadlines:
    """Fails every watched pull that is not done at its deadline. Its thread sleeps in between."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int]] = []
        self._pulls: dict[int, tuple[Pull, float]] = {}
        self._numbers = itertools.count()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvconnect-deadlines", daemon=True)
        self._thread.start()

    def watch(self, pull: Pull, seconds: float) -> None:
        """Fails `pull` after `seconds` unless it is done by then. Never blocks."""
        at = time.monotonic() + seconds
        with self._changed:
            number = next(self._numbers)
            self._pulls[number] = (pull, seconds)
            heapq.heappush(self._heap, (at, number))
            if self._heap[0][1] == number:
                self._changed.notify()
        pull.done.add_done_callback(lambda _: self._forget(number))

    def close(self) -> None:
        """Ends the thread. Remaining pulls are no longer watched."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _forget(self, number: int) -> None:
        with self._changed:
            self._pulls.pop(number, None)
            # A pull's entry stays until its time, or until most entries are of pulls that are done.
            if len(self._heap) > 2 * len(self._pulls) + 64:
                self._heap = [entry for entry in self._heap if entry[1] in self._pulls]
                heapq.heapify(self._heap)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                if not self._heap:
                    self._changed.wait()
                    continue
                left = self._heap[0][0] - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                    continue
                late = self._pulls.pop(heapq.heappop(self._heap)[1], None)
            if late is not None:
                pull, seconds = late
                pull.fail(PullFailed("deadline", f"the peer did not deliver within {seconds:g} s"))
