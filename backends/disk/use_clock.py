"""The clock whose stamps order the uses of a disk store's blocks."""

from __future__ import annotations

import time

from kvconnect.backends.disk.find import microseconds

SANE = 1 << 56
"""Microseconds of the year 4253: a later stamp counts as damage and is ignored."""


class UseClock:
    """A clock of use: each stamp is newer than all before it.

    A stamp is the Unix time in microseconds. If the system's clock went back, stamps continue from
    the newest one at the monotonic clock's rate.

    Args:
        newest: the newest stamp of the index below `SANE`; 0: there is none.
    """

    def __init__(self, newest: int) -> None:
        self._began_ns = time.monotonic_ns()
        self._base = newest + 1

    def now(self) -> int:
        """Returns the stamp for a use now."""
        elapsed = (time.monotonic_ns() - self._began_ns) // 1000
        self._base = max(self._base, microseconds() - elapsed)
        return self._base + elapsed
