"""The clock that stamps the use of a disk store's blocks, whatever the system's clock does."""

from __future__ import annotations

import sqlite3
import time

from kvconnect.backends.disk.find import microseconds

# Microseconds of the year 4253: a later stamp counts as damage and is ignored.
_SANE = 1 << 56


class UseClock:
    """A clock of use: each stamp is newer than all before it.

    A stamp is the Unix time in microseconds. If the system's clock went back, stamps continue from
    the newest one at the monotonic clock's rate.

    Args:
        db: the index's connection, in a transaction; its newest stamp is the first one's minimum.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._began_ns = time.monotonic_ns()
        newest = db.execute("SELECT max(used) FROM blocks WHERE used<?", (_SANE,)).fetchall()
        self._base = (newest[0][0] or 0) + 1

    def now(self) -> int:
        """Returns the stamp for a use now."""
        elapsed = self._elapsed()
        self._base = max(self._base, microseconds() - elapsed)
        return self._base + elapsed

    def follow(self, db: sqlite3.Connection) -> None:
        """Makes stamps newer than those of the block that a process stored last.

        The system's clock may have been ahead while only that process stored blocks. `db` is the
        index's connection, in a transaction.
        """
        last = db.execute("SELECT used FROM blocks ORDER BY id DESC LIMIT 1").fetchall()
        stamps = [used for (used,) in last if isinstance(used, int) and used < _SANE]
        self._base = max([self._base, *(used + 1 - self._elapsed() for used in stamps)])

    def _elapsed(self) -> int:
        return (time.monotonic_ns() - self._began_ns) // 1000
