"""A wall clock that jumps."""

from __future__ import annotations

import time
from typing import Self
from unittest.mock import patch


class ShiftedClock:
    """Moves ``time.time()`` and ``time.time_ns()`` of this process within the context.

    The monotonic clock is unaffected: leases and deadlines must be measured with it.
    """

    def __init__(self) -> None:
        self._shift_ns = 0
        self._real_ns = time.time_ns
        self._patches = (
            patch.object(time, "time_ns", self._time_ns),
            patch.object(time, "time", lambda: self._time_ns() / 1e9),
        )

    def forward(self, seconds: float) -> None:
        """Moves the clock; backward if `seconds` is below zero."""
        self._shift_ns += int(seconds * 1e9)

    def _time_ns(self) -> int:
        return self._real_ns() + self._shift_ns

    def __enter__(self) -> Self:
        for one in self._patches:
            one.start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._patches:
            one.stop()
