"""When vLLM's configuration was made in this process: before any of its engines loads weights."""

from __future__ import annotations

import multiprocessing
import threading
import time

__all__ = ["LookupTimes", "lookup_times"]


class LookupTimes:
    """Notes each lookup of the connector's class: vLLM's configuration does one when it is made.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unused: list[int] = []
        self._last: int | None = None

    def note(self) -> None:
        """Notes a lookup, now."""
        with self._lock:
            self._unused.append(time.time_ns())
            del self._unused[1:-1]  # the first and the last count

    def take(self) -> int | None:
        """Returns when the engine that is being made may have begun to load its model.

        That is the first lookup since the last engine was made, without the one that made this
        connector: nanoseconds since the epoch. ``None``: the process was started for the engine,
        so it is the process's own start.
        """
        if multiprocessing.parent_process() is not None:
            return None
        with self._lock:
            times, self._unused = self._unused[:-1], []
            if times or self._last is None:
                self._last = times[0] if times else time.time_ns()
            return self._last


lookup_times = LookupTimes()
"""Of this process."""
