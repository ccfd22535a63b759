"""The parts of large loads or saves, moved side by side by the threads of one lane."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import Empty, SimpleQueue

from kvconnect.backends.lanes import Lane, fulfil
from kvconnect.errors import BackendUnavailable

__all__ = ["PartQueue"]

# So many threads help those whose calls have parts: enough to keep the disk busy.
_HELPERS = 2


class PartQueue:
    """Runs the parts of calls that are themselves work of `lane`, in the order of the calls.

    A call runs parts until the last of its own has begun, and free threads of the lane help it. So
    no thread waits for work that has no thread. A call that came first ends first: what follows its
    I/O, a commit or a checksum, then happens during the next call's I/O. Calls that shared the disk
    evenly would all end at once, and leave it idle.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._parts: SimpleQueue[tuple[Future[None], Callable[[], None]]] = SimpleQueue()
        self._helpers = threading.Semaphore(_HELPERS)

    def run(self, parts: Sequence[Callable[[], None]]) -> None:
        """Run `parts`; blocks until all have ended, though one fails: they use the same buffers.

        Raises what the first of them raises that fails.
        """
        if len(parts) == 1:  # which does not wait for those of others
            parts[0]()
            return
        futures: list[Future[None]] = [Future() for _ in parts]
        for item in zip(futures, parts, strict=True):
            self._parts.put(item)
        with suppress(BackendUnavailable):  # the lane is being closed: this thread runs them all
            for _ in range(min(_HELPERS, len(parts) - 1)):
                self._lane.submit(self._help)
        while futures and not (futures[-1].running() or futures[-1].done()):
            self._run_one()
        wait(futures)
        for future in futures:
            future.result()

    def _help(self) -> None:
        if self._helpers.acquire(blocking=False):
            try:
                while self._run_one():
                    pass
            finally:
                self._helpers.release()

    def _run_one(self) -> bool:
        try:
            fulfil(*self._parts.get_nowait())
        except Empty:
            return False
        return True
