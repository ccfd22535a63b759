"""The write-ahead log of the disk store's index, kept short."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

from kvconnect.backends.disk.errors import IndexDamaged, IndexFull, index_errors
from kvconnect.backends.disk.format import log_file_nbytes
from kvconnect.errors import BackendUnavailable

__all__ = ["IndexLog"]

logger = logging.getLogger("kvconnect")

# For the other processes' transactions to end, after which the log can start over; one that was
# stopped in the middle of its own must not hold up the saves here.
_BUSY_MS = 100
# A log that is so many times too long is one that cannot be moved: some process was stopped while
# it read. In all but very small stores it takes an eighth of the capacity then.
_STUCK = 8


class IndexLog:
    """Bounds the log where SQLite does not; `db` is not used meanwhile, nor in a transaction.

    SQLite moves the log into the database at the end of a commit. It never catches up with
    processes that read or write all the time: those wait for what is done here. Whenever a process
    dies, the log holds what is not in the database yet.

    Args:
        nbytes: at so many SQLite moves the log; at twice as many `bound` does.
    """

    def __init__(self, db: sqlite3.Connection, directory: Path, nbytes: int) -> None:
        self._db = db
        self._directory = directory
        self._limit = nbytes

    def bound(self) -> None:
        """Cut a log that is too long; blocks for that. Is to be called after each transaction.

        Never raises for a log that cannot be cut: the next call tries again.
        """
        if log_file_nbytes(self._directory) <= 2 * self._limit:
            return
        (busy_ms,) = self._db.execute("PRAGMA busy_timeout").fetchone()
        self._db.execute(f"PRAGMA busy_timeout={_BUSY_MS}")
        try:
            with index_errors():
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except (BackendUnavailable, IndexDamaged) as error:
            logger.debug("disk store %s: the log was not cut: %s", self._directory, error)
        finally:
            self._db.execute(f"PRAGMA busy_timeout={busy_ms}")

    @property
    def stuck(self) -> bool:
        """Whether it is far longer than it should be, since it cannot be moved."""
        return log_file_nbytes(self._directory) > _STUCK * self._limit

    def check(self) -> None:
        """Refuse what makes a log longer that cannot be moved; tries to move it, and blocks.

        Raises:
            IndexFull: it cannot be.
        """
        if self.stuck:
            self.bound()
            if self.stuck:
                raise IndexFull(
                    "disk store: the index's log cannot be moved: a process that reads the index "
                    "was stopped, or does not end its transaction"
                )
