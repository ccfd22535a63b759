"""The clock of use: which of two blocks of a disk store was used later."""

from __future__ import annotations

import time

from kvconnect.backends.disk.find import microseconds

__all__ = ["SANE", "UseClock"]

SANE = 1 << 56
"""Microseconds of the year 4253: a later stamp is damage, and nothing follows it."""


class UseClock:
    """A clock of use: each stamp is newer than all before it.

    A stamp is the Unix time in microseconds. Where that is not newer than the stamps before, since
    the clock went back, stamps continue from those at the monotonic clock's rate.

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
