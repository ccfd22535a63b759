"""The errors of the disk store's index and data files, and the SQLite codes behind them."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from kvconnect.errors import BackendUnavailable

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The error numbers of a limit on bytes: a full disk, a quota, a file size limit."""

_UNAVAILABLE = {
    sqlite3.SQLITE_BUSY: "another process holds the index's lock",
    sqlite3.SQLITE_LOCKED: "the index is locked",
    sqlite3.SQLITE_PROTOCOL: "other processes hold the locks of the index's log",
    sqlite3.SQLITE_CANTOPEN: "the index cannot be opened",
    sqlite3.SQLITE_IOERR: "reading or writing the index failed",
    sqlite3.SQLITE_FULL: "no space for the index",
    sqlite3.SQLITE_READONLY: "the index is read-only",
    sqlite3.SQLITE_PERM: "the index may not be accessed",
    sqlite3.SQLITE_NOMEM: "no memory for the index",
    sqlite3.SQLITE_INTERRUPT: "interrupted",
}


class SegmentLost(Exception):
    """The error that a segment's file is gone or cut short. Never leaves the disk store."""

    def __init__(self, segment: int) -> None:
        super().__init__(f"segment {segment} is gone or cut short")
        self.segment = segment


class IndexDamaged(Exception):
    """The error that the index is not what this code wrote. Never leaves the disk store."""


class IndexFull(BackendUnavailable):
    """The error that there is no space for the index to grow."""

    errno = errno.ENOSPC
    strerror = "no space left on device"


class IndexFailed(BackendUnavailable):
    """The error that reading or writing the index failed: the disk failed, or is full."""


class IndexNotOpened(BackendUnavailable):
    """The error that a file of the index cannot be opened, or made."""


class IndexReadOnly(BackendUnavailable):
    """The error that SQLite cannot write: it lacks permissions, or the header is damaged."""


class IndexConnectionLost(BackendUnavailable):
    """The error that this connection is unusable; the index itself may be sound."""


_KINDS = {
    sqlite3.SQLITE_CANTOPEN: IndexNotOpened,
    sqlite3.SQLITE_FULL: IndexFull,
    sqlite3.SQLITE_IOERR: IndexFailed,
    sqlite3.SQLITE_READONLY: IndexReadOnly,
}


@contextmanager
def index_errors() -> Iterator[None]:
    """Maps SQLite's errors to those of this module.

    Raises:
        BackendUnavailable: another attempt may succeed later.
        IndexConnectionLost: another connection may succeed.
        IndexDamaged: no attempt can succeed.
    """
    try:
        yield
    except (sqlite3.InterfaceError, sqlite3.ProgrammingError) as error:
        raise IndexConnectionLost(f"disk store: the index's connection: {error}") from error
    except UnicodeDecodeError as error:  # SQLite quotes damaged text in its message
        raise IndexDamaged(str(error)) from error
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        reason = _UNAVAILABLE.get(code)
        if reason is None:
            raise IndexDamaged(str(error)) from error
        kind = _KINDS.get(code, BackendUnavailable)
        raise kind(f"disk store: {reason} ({error})") from error
