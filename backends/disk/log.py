"""The write-ahead log of the disk store's index, kept short without holding up a save."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path

from kvconnect.backends.disk.errors import IndexDamaged, IndexFull, index_errors
from kvconnect.backends.disk.format import connect, log_file_nbytes
from kvconnect.backends.disk.settings import Durability
from kvconnect.backends.lanes import running_threads
from kvconnect.errors import BackendUnavailable

__all__ = ["IndexLog"]

logger = logging.getLogger("kvconnect")

# For the other processes' transactions to end, after which the log can start over; one that was
# stopped in the middle of its own must not hold up those who wait for this.
_BUSY_MS = 100
# For another process to end what it moves; SQLite does not wait for that by itself.
_OTHERS_S = 1.0
_PAUSE_S = 0.005
# A log that is so many times too long is one that cannot be moved: some process was stopped while
# it read. In all but very small stores it takes an eighth of the capacity then.
_STUCK = 8


class IndexLog:
    """Moves the log into the database on a thread of its own. Thread-safe.

    SQLite would do so at the end of a commit, two syncs long, while the disk has nothing to write.
    Whenever a process dies, the log holds what is not in the database yet.

    Args:
        nbytes: at so many the log is moved; at twice as many `bound` waits for that.
        at: called with the name of the point that is reached; tests end the process there.

    Raises:
        BackendUnavailable, IndexDamaged: as `connect`; nothing stays open.
    """

    def __init__(
        self, directory: Path, durability: Durability, nbytes: int, at: Callable[[str], None]
    ) -> None:
        self._directory = directory
        self._limit = nbytes
        self._at = at
        self._thread = running_threads(1, "kvconnect-disk-log")
        try:
            self._db = connect(directory, durability, nbytes)
        except BaseException:
            self._thread.shutdown()
            raise
        self._db.execute(f"PRAGMA busy_timeout={_BUSY_MS}")
        self._lock = threading.Lock()
        self._moving: Future[None] | None = None

    def bound(self) -> None:
        """See to it that the log does not grow much longer; call it after each transaction.

        Blocks only where writers are faster than the disk takes the log. Never raises for a log
        that cannot be moved: it is tried again after the next transaction.
        """
        nbytes = log_file_nbytes(self._directory)
        if nbytes <= self._limit:
            return
        with self._lock:
            if self._moving is None or self._moving.done():
                self._moving = self._thread.submit(self._move)
            moving = self._moving
        if nbytes > 2 * self._limit:
            wait([moving])

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

    def close(self) -> None:
        """End the thread, once a move under way is done. The second time does nothing."""
        self._thread.shutdown()
        self._db.close()

    def _move(self) -> None:
        try:
            with index_errors():
                # Nobody waits for this one, however much there is to copy.
                self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
                self._at("copied")
                # But it never catches up with those who write all the time. They wait for this one,
                # which has only to copy what they wrote meanwhile.
                give_up = time.monotonic() + _OTHERS_S
                while log_file_nbytes(self._directory) > self._limit and not self._cut():
                    if time.monotonic() > give_up:
                        break
                    time.sleep(_PAUSE_S)
        except (BackendUnavailable, IndexDamaged) as error:
            logger.debug("disk store %s: the log was not moved: %s", self._directory, error)

    def _cut(self) -> bool:
        """Whether it was tried; not if another process moves the log just now."""
        _, pages, _ = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return int(pages) >= 0
