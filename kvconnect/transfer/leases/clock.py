"""The clock that leases are counted on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

__all__ = ["MAX_DRIFT", "Clock", "lease_clock"]

Clock: TypeAlias = Callable[[], float]
"""Seconds, never backwards, from any beginning."""

MAX_DRIFT = 0.01
"""By at most this fraction do clocks of two hosts run at different speed. NTP slews by 0.0005."""


def lease_clock() -> float:
    """Returns the seconds since this host started, including the time it was suspended.

    ``time.monotonic`` does not advance while a host sleeps. After a sleep, a lease that the peer
    has ended would seem to be held.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)
