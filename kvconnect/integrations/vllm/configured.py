"""When vLLM's configuration was made in this process: before any of its engines loads weights."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from types import FrameType

__all__ = ["LookupTimes", "lookup_times"]

_CONFIGURATION = "vllm.config.vllm"
_FRAMES = 12


class LookupTimes:
    """Notes lookups of the connector's class by vLLM's configuration, which does one when made.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: int | None = None
        self._last_taken: int | None = None

    def note(self) -> None:
        """Notes a lookup, if a configuration that is being made does it on this thread."""
        if not _is_configuring():
            return
        with self._lock:
            if self._first is None:
                self._first = time.time_ns()

    def take(self) -> int | None:
        """Returns when the engine that is being made may have begun to load its model.

        That is when the first configuration since the last engine was made, in nanoseconds since
        the epoch. ``None``: the process was started for the engine, so it is the process's start.
        """
        if multiprocessing.parent_process() is not None:
            return None
        with self._lock:
            first, self._first = self._first, None
            if first is not None:
                self._last_taken = first
            elif self._last_taken is None:
                self._last_taken = time.time_ns()
            return self._last_taken


lookup_times = LookupTimes()
"""Of this process."""


def _is_configuring() -> bool:
    caller: FrameType | None = sys._getframe(1)  # noqa: SLF001  the only way to know a caller
    for _ in range(_FRAMES):
        if caller is None:
            return False
        if caller.f_globals.get("__name__") == _CONFIGURATION:
            return True
        caller = caller.f_back
    return False
