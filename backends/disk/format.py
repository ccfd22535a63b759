"""The disk store's index as a SQLite database: how it is opened, and what its errors mean."""

from __future__ import annotations

import os
import secrets
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from kvconnect.errors import BackendUnavailable

__all__ = [
    "INDEX_NAME",
    "Durability",
    "IndexConnectionLost",
    "IndexDamaged",
    "IndexFull",
    "IndexReadOnly",
    "connect",
    "connect_read_only",
    "has_model_column",
    "index_errors",
    "index_nbytes",
    "log_file_nbytes",
    "log_nbytes",
    "make_index",
    "set_aside",
]

Durability = Literal["process", "power"]

INDEX_NAME = "index.sqlite3"
_SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE segments(          -- data files
    id INTEGER PRIMARY KEY AUTOINCREMENT,   -- never used again, so a stale handle is only stale
    size INTEGER NOT NULL,      -- bytes of each slot
    slots INTEGER NOT NULL,
    fresh INTEGER NOT NULL      -- slots from here on were never used
);
CREATE TABLE free(              -- used once, and free again
    segment INTEGER, slot INTEGER, PRIMARY KEY(segment, slot)
) WITHOUT ROWID;
CREATE TABLE reserved(          -- being written by a living owner, or left behind by a dead one
    owner TEXT, save INTEGER, segment INTEGER, slot INTEGER,
    PRIMARY KEY(owner, save, segment, slot)
) WITHOUT ROWID;
CREATE TABLE blocks(
    id INTEGER PRIMARY KEY AUTOINCREMENT,   -- of this copy of the block: another copy, another id
    key BLOB NOT NULL UNIQUE,
    segment INTEGER NOT NULL,
    slot INTEGER NOT NULL,
    size INTEGER NOT NULL,      -- of the slot
    length INTEGER NOT NULL,
    priority INTEGER NOT NULL,
    created INTEGER NOT NULL,   -- Unix time in microseconds
    used INTEGER NOT NULL,      -- the same; a block used with its ancestors is older than they
    parent BLOB,
    tokens BLOB,                -- int32, little endian
    namespace BLOB NOT NULL,
    pool_group INTEGER NOT NULL,
    model BLOB NOT NULL DEFAULT x''
);
CREATE INDEX blocks_by_use ON blocks(size, priority, used);
CREATE INDEX blocks_by_segment ON blocks(segment, used);
CREATE INDEX blocks_by_parent ON blocks(parent);
"""
# The first data file of an index has one of so many numbers, so that none of another index, there
# before or after it, has the same name.
_FIRST_SEGMENTS = 1 << 40
_BUSY_S = 5.0
_PAUSE_S = 0.005
# The write-ahead log is moved into the database at so many pages; see `IndexLog`.
_LOG_PAGES = 4096
_LOG_PAGES_MIN = 16
_PAGE = 4096
_CACHE_KIB = 32 << 10

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


class IndexDamaged(Exception):
    """The index is not what this code wrote. Never leaves the disk store."""


class IndexFull(BackendUnavailable):
    """There is no space for the index to grow."""


class IndexNotOpened(BackendUnavailable):
    """A file of the index cannot be opened, or made."""


class IndexReadOnly(BackendUnavailable):
    """SQLite will not write. A damaged header looks the same; the file's permissions tell."""


class IndexConnectionLost(BackendUnavailable):
    """This connection is of no use any more; that says nothing about the index."""


_KINDS = {
    sqlite3.SQLITE_CANTOPEN: IndexNotOpened,
    sqlite3.SQLITE_FULL: IndexFull,
    sqlite3.SQLITE_READONLY: IndexReadOnly,
}


@contextmanager
def index_errors() -> Iterator[None]:
    """SQLite's errors as ours.

    Raises:
        BackendUnavailable: it may work later.
        IndexConnectionLost: it may work with another connection.
        IndexDamaged: it will not.
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


def log_nbytes(capacity: int) -> int:
    """How long the index's log may become: little in a small store, but each move takes a sync."""
    return max(_LOG_PAGES_MIN, min(_LOG_PAGES, capacity // 64 // _PAGE)) * _PAGE


def make_index(directory: Path) -> None:
    """An empty file, if there is no index yet.

    Raises:
        OSError: there is none.
    """
    # Tokens can be read from it; its log gets the same mode. It is made without being opened, for
    # closing a file drops all locks that this process has on it, other connections' ones included.
    with suppress(FileExistsError):
        os.mknod(directory / INDEX_NAME, 0o600)


def connect(directory: Path, durability: Durability, log: int) -> sqlite3.Connection:
    """The index in `directory`, made if it is not there.

    Its log is cut to `log` bytes when it starts over; when that is, `IndexLog` decides.

    Raises:
        BackendUnavailable, IndexDamaged: nothing stays open.
    """
    path = directory / INDEX_NAME
    make_index(directory)
    with index_errors():
        db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        with index_errors():
            _start_log(db)
            db.execute(f"PRAGMA synchronous={'FULL' if durability == 'power' else 'NORMAL'}")
            db.execute("PRAGMA wal_autocheckpoint=0")
            db.execute(f"PRAGMA journal_size_limit={log}")
            db.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
            if _version(db) == 0:
                db.execute("BEGIN IMMEDIATE")
                if _version(db) == 0:
                    for statement in _SCHEMA.rstrip().split(";\n"):
                        db.execute(statement)
                    db.execute(
                        "INSERT INTO sqlite_sequence VALUES('segments', ?)",
                        (secrets.randbelow(_FIRST_SEGMENTS),),
                    )
                    db.execute(f"PRAGMA user_version={_SCHEMA_VERSION}")
                db.execute("COMMIT")
            _expect_version(db)
            _add_model_column(db)
    except BaseException:
        db.close()
        raise
    return db


def connect_read_only(directory: Path) -> sqlite3.Connection | None:
    """The index, without changing it, also in a directory that cannot be written to.

    ``None``: it is being made, and nothing is stored yet.

    Raises:
        BackendUnavailable, IndexDamaged: nothing stays open.
    """
    try:
        return _connect_read_only(directory, "mode=ro")
    except (IndexNotOpened, IndexReadOnly):
        # SQLite needs a shared-memory file beside a database with a log. Where it cannot make one,
        # it can read the database only if there is nothing in the log, and nobody writes.
        if log_file_nbytes(directory):
            raise
    return _connect_read_only(directory, "mode=ro&immutable=1")


def _connect_read_only(directory: Path, mode: str) -> sqlite3.Connection | None:
    with index_errors():
        db = sqlite3.connect(
            f"file:{quote(str(directory / INDEX_NAME))}?{mode}",
            uri=True,
            timeout=_BUSY_S,
            isolation_level=None,
            check_same_thread=False,
        )
    try:
        with index_errors():
            if db.execute("SELECT count(*) FROM sqlite_schema").fetchone() == (0,):
                db.close()
                return None
            _expect_version(db)
    except BaseException:
        db.close()
        raise
    return db


def has_model_column(db: sqlite3.Connection) -> bool:
    """Whether blocks have a model. Not if only an older version has written to the index."""
    return any(name == "model" for _, name, *_ in db.execute("PRAGMA table_info(blocks)"))


def _start_log(db: sqlite3.Connection) -> None:
    # Only the first opening of a directory changes anything. SQLite does not wait for another one
    # that does so: both may hold the lock that both would wait for. One of them goes on.
    give_up = time.monotonic() + _BUSY_S
    while True:
        try:
            db.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > give_up:
                raise
            time.sleep(_PAUSE_S)
        else:
            return


def _add_model_column(db: sqlite3.Connection) -> None:
    # No new schema version: an older kvconnect goes on with such an index, and leaves it empty.
    if has_model_column(db):
        return
    db.execute("BEGIN IMMEDIATE")
    if not has_model_column(db):
        db.execute("ALTER TABLE blocks ADD COLUMN model BLOB NOT NULL DEFAULT x''")
    db.execute("COMMIT")


def index_nbytes(directory: Path, log: int) -> int:
    """Bytes of the index and its shared memory, and of its log when it is full."""
    log = max(2 * log, log_file_nbytes(directory))
    return _nbytes(directory / INDEX_NAME) + _nbytes(directory / f"{INDEX_NAME}-shm") + log


def log_file_nbytes(directory: Path) -> int:
    """Bytes of the index's log as it is."""
    return _nbytes(directory / f"{INDEX_NAME}-wal")


def _nbytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def set_aside(directory: Path) -> None:
    """Move a damaged index out of the way; the one set aside before is lost."""
    path = directory / INDEX_NAME
    path.replace(path.with_name(INDEX_NAME + ".damaged"))
    for suffix in ("-wal", "-shm"):
        path.with_name(INDEX_NAME + suffix).unlink(missing_ok=True)


def _version(db: sqlite3.Connection) -> int:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    return int(version)


def _expect_version(db: sqlite3.Connection) -> None:
    if (version := _version(db)) != _SCHEMA_VERSION:
        raise IndexDamaged(f"schema version {version}, not {_SCHEMA_VERSION}")
    db.execute("SELECT 1 FROM blocks, segments, free, reserved LIMIT 1").fetchone()
