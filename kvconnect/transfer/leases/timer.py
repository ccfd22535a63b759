"""The clock that leases are counted on, and a thread that runs a callable when it is due."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from kvconnect.trace import count

logger = logging.getLogger("kvconnect")

_LONGEST_S = 1.0
_AFTER_ERROR_S = 1.0

Clock: TypeAlias = Callable[[], float]
"""Returns seconds since any fixed moment; never runs backwards."""

MAX_DRIFT = 0.01
"""The largest difference in speed of two hosts' clocks, as a fraction. NTP slews by 0.0005."""


def lease_clock() -> float:
    """Returns the seconds since this host started, including the time it was suspended.

    ``time.monotonic`` does not advance while a host sleeps. After a sleep, a lease that the peer
    has ended would seem to be held.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Timer:
    """Calls `work` when it is due and when `wake` was called, independent of an engine's step.

    Args:
        name: the name of the thread.
        work: returns the time on `clock` when it is due next; ``None`` means at the next `wake`. An
            exception is logged, and `work` is called again a second later: leases must end in any
            case.
        clock: the clock of the times that `work` returns.
    """

    def __init__(
        self, name: str, work: Callable[[], float | None], clock: Clock = lease_clock
    ) -> None:
        self._work = work
        self._clock = clock
        self._changed = threading.Condition()
        self._woken = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Makes the thread call `work` soon. Does not block."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def close(self, timeout_s: float = 5.0) -> None:
        """Calls `work` no more. Blocks until a running call has ended, or `timeout_s`."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            try:
                due = self._work()
            except Exception:
                count("transfer.timer.failed")
                logger.exception("%s: failed, and is tried again", self._thread.name)
                due = self._clock() + _AFTER_ERROR_S
            with self._changed:
                while not (self._woken or self._closed):
                    left = None if due is None else due - self._clock()
                    if left is not None and left <= 0:
                        break
                    # Waits in pieces: a wait does not count time that the host was suspended.
                    self._changed.wait(None if left is None else min(left, _LONGEST_S))
                if self._closed:
                    return
                self._woken = False
