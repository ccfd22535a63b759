"""The disk store's index as a SQLite database, and its write-ahead log, kept short."""

from __future__ import annotations

import logging
import os
import secrets
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from kvconnect.backends.disk.damage import expect_schema, expect_sound
from kvconnect.backends.disk.errors import (
    IndexDamaged,
    IndexFailed,
    IndexFull,
    IndexNotOpened,
    IndexReadOnly,
    index_errors,
)
from kvconnect.backends.disk.settings import Durability
from kvconnect.errors import BackendUnavailable

logger = logging.getLogger("kvconnect")

INDEX_NAME = "index.sqlite3"
FOREVER = 1 << 62
"""The end of what has none, in the unit of the index: microseconds of Unix time."""

_SCHEMA_VERSION = 1
_SCHEMA = f"""
CREATE TABLE segments(          -- data files
    id INTEGER PRIMARY KEY AUTOINCREMENT,   -- never used again, so a stale handle is only stale
    size INTEGER NOT NULL,      -- bytes of each slot
    slots INTEGER NOT NULL,
    fresh INTEGER NOT NULL      -- slots from here on were never used
) STRICT;
CREATE TABLE free(              -- used once, and free again
    segment INTEGER, slot INTEGER, PRIMARY KEY(segment, slot)
) WITHOUT ROWID, STRICT;
CREATE TABLE reserved(          -- being written by a living owner, or left behind by a dead one
    owner TEXT, save INTEGER, segment INTEGER, slot INTEGER,
    PRIMARY KEY(owner, save, segment, slot)
) WITHOUT ROWID, STRICT;
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
    model BLOB NOT NULL DEFAULT x'',
    pinned INTEGER NOT NULL DEFAULT 0,      -- until then it is not dropped; Unix time likewise
    hits INTEGER NOT NULL DEFAULT 0,        -- loads of it
    expires INTEGER NOT NULL DEFAULT {FOREVER}  -- its own end; Unix time likewise
) STRICT;
CREATE INDEX blocks_by_segment ON blocks(segment, used);
CREATE INDEX blocks_by_parent ON blocks(parent);
"""
# The database indexes of pins and ends. In older versions the first one lacks `pinned`: then it is
# made anew. Eviction iterates over it, which excludes pinned blocks.
_LATER_INDEXES = (
    "DROP INDEX IF EXISTS blocks_by_use",
    "CREATE INDEX blocks_by_use ON blocks(size, pinned, priority, used)",
    "CREATE INDEX IF NOT EXISTS blocks_pinned ON blocks(pinned, segment, size) WHERE pinned > 0",
    f"CREATE INDEX IF NOT EXISTS blocks_ending ON blocks(expires) WHERE expires < {FOREVER}",
)
# The columns that indexes of older versions lack.
_LATER_COLUMNS = {
    "model": "BLOB NOT NULL DEFAULT x''",
    "pinned": "INTEGER NOT NULL DEFAULT 0",
    "hits": "INTEGER NOT NULL DEFAULT 0",
    "expires": f"INTEGER NOT NULL DEFAULT {FOREVER}",
}
# Tables that refuse values of another type. An index made by an older SQLite is used without them.
_HAS_STRICT = (3, 37, 0)
# The range of the random number of an index's first data file, so that files of an earlier or later
# index have other names.
_FIRST_SEGMENTS = 1 << 40
# SQLite syncs each commit with FULL, and only the moves of its log into the database with NORMAL.
_SYNCHRONOUS: dict[Durability, str] = {"power": "FULL", "process": "NORMAL"}
_BUSY_S = 5.0
_PAUSE_S = 0.005
# SQLite moves the write-ahead log into the database at so many pages; see `IndexLog`, too.
_LOG_PAGES = 4096
_LOG_PAGES_MIN = 16
_PAGE = 4096
_CACHE_KIB = 32 << 10
# Milliseconds for other processes' transactions to end, so that the log can start over. A process
# that is stopped in a transaction must not delay saves for longer.
_BUSY_MS = 100
# The factor by which a log is too long to count as stuck, because a process was stopped while it
# read. Except in very small stores, the log takes an eighth of the capacity then.
_STUCK = 8


def log_nbytes(capacity: int) -> int:
    """Returns the length that the index's log may reach: short in a small store.

    Each move of the log into the database costs a sync, so it is not shorter than needed.
    """
    return max(_LOG_PAGES_MIN, min(_LOG_PAGES, capacity // 64 // _PAGE)) * _PAGE


def make_index(directory: Path) -> None:
    """Creates an empty file, if there is no index yet.

    Raises:
        OSError: the file cannot be created.
    """
    # The index contains tokens, so only its owner may read it; its log gets the same mode. It is
    # made without being opened, because closing a file drops all locks of this process on it, also
    # those of other connections.
    with suppress(FileExistsError):
        os.mknod(directory / INDEX_NAME, 0o600)


def connect(directory: Path, durability: Durability, log: int) -> sqlite3.Connection:
    """Returns a connection to the index in `directory`, which is created if needed.

    The log is moved into the index at `log` bytes, and cut to that length when it starts over.

    Raises:
        BackendUnavailable, IndexDamaged: nothing stays open.
    """
    path = directory / INDEX_NAME
    make_index(directory)
    with _opening(path) as db:
        _start_log(db)
        db.execute(f"PRAGMA synchronous={_SYNCHRONOUS[durability]}")
        db.execute(f"PRAGMA wal_autocheckpoint={log // _PAGE}")
        db.execute(f"PRAGMA journal_size_limit={log}")
        db.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
        db.execute("PRAGMA secure_delete=ON")  # tokens of deleted blocks do not stay in the file
        if _version(db) == 0:
            db.execute("BEGIN IMMEDIATE")
            if _version(db) == 0:
                _make_schema(db)
                db.execute(
                    "INSERT INTO sqlite_sequence VALUES('segments', ?)",
                    (secrets.randbelow(_FIRST_SEGMENTS),),
                )
            db.execute("COMMIT")
        _expect_version(db)
        expect_schema(db)
        _add_columns(db)
    return db


def connect_read_only(directory: Path) -> sqlite3.Connection | None:
    """Returns a connection that does not change the index, even in a read-only directory.

    Returns ``None`` if another process is making the index, so that no block is stored yet.

    Raises:
        BackendUnavailable, IndexDamaged: nothing stays open.
    """
    try:
        return _connect_read_only(directory, "mode=ro")
    except (IndexNotOpened, IndexReadOnly, IndexFailed):
        # SQLite needs a shared-memory file beside a database with a log. Where it cannot make one,
        # or has no space for it, it can read the database only if there is nothing in the log, and
        # no process writes.
        if log_file_nbytes(directory):
            raise
    return _connect_read_only(directory, "mode=ro&immutable=1")


def _connect_read_only(directory: Path, mode: str) -> sqlite3.Connection | None:
    with _opening(f"file:{quote(str(directory / INDEX_NAME))}?{mode}", uri=True) as db:
        if db.execute("SELECT count(*) FROM sqlite_schema").fetchone() == (0,):
            db.close()
            return None
        _expect_version(db)
        expect_schema(db)
        expect_sound(db)
    return db


@contextmanager
def _opening(target: str | Path, *, uri: bool = False) -> Iterator[sqlite3.Connection]:
    """Yields a connection to `target`; closes it if the body raises."""
    with index_errors():
        db = sqlite3.connect(
            target, timeout=_BUSY_S, isolation_level=None, check_same_thread=False, uri=uri
        )
        try:
            yield db
        except BaseException:
            db.close()
            raise


def empty_index() -> sqlite3.Connection:
    """Returns an index in memory, in which nothing is stored."""
    db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    _make_schema(db)
    return db


def has_column(db: sqlite3.Connection, column: str) -> bool:
    """Returns whether blocks have a `column`: not if only an older version wrote to the index."""
    return any(name == column for _, name, *_ in db.execute("PRAGMA table_info(blocks)"))


def _make_schema(db: sqlite3.Connection) -> None:
    schema = _SCHEMA
    if sqlite3.sqlite_version_info < _HAS_STRICT:
        schema = schema.replace("ROWID, STRICT", "ROWID").replace(") STRICT", ")")
    for statement in schema.rstrip().split(";\n"):
        db.execute(statement)
    for statement in _LATER_INDEXES:
        db.execute(statement)
    db.execute(f"PRAGMA user_version={_SCHEMA_VERSION}")


def _start_log(db: sqlite3.Connection) -> None:
    # Only the first opening of a directory changes the index. SQLite does not wait for another
    # process that does so, since both may hold a lock that the other one needs. One of the two
    # continues.
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


def _add_columns(db: sqlite3.Connection) -> None:
    # No new schema version: an older kvconnect still uses such an index, and leaves them empty.
    if all(has_column(db, column) for column in _LATER_COLUMNS):
        return
    db.execute("BEGIN IMMEDIATE")
    for column, definition in _LATER_COLUMNS.items():
        if not has_column(db, column):
            db.execute(f"ALTER TABLE blocks ADD COLUMN {column} {definition}")
    for statement in _LATER_INDEXES:
        db.execute(statement)
    db.execute("COMMIT")


def index_nbytes(directory: Path, log: int) -> int:
    """Returns the bytes of the index and its shared memory, and of its log when it is full."""
    log = max(2 * log, log_file_nbytes(directory))
    return _nbytes(directory / INDEX_NAME) + _nbytes(directory / f"{INDEX_NAME}-shm") + log


def log_file_nbytes(directory: Path) -> int:
    """Returns the present bytes of the index's log."""
    return _nbytes(directory / f"{INDEX_NAME}-wal")


def _nbytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _version(db: sqlite3.Connection) -> int:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    return int(version)


def _expect_version(db: sqlite3.Connection) -> None:
    if (version := _version(db)) != _SCHEMA_VERSION:
        raise IndexDamaged(f"schema version {version}, not {_SCHEMA_VERSION}")


class IndexLog:
    """Limits the log's length where SQLite does not.

    Call its methods while no other thread uses `db`, and outside a transaction. SQLite moves the
    log into the database at the end of a commit, but never finishes that while processes read or
    write all the time; `bound` makes them wait. If a process dies, the log keeps the changes that
    are not in the database yet.

    Args:
        nbytes: the length at which SQLite moves the log; `bound` moves it at twice that length.
    """

    def __init__(self, db: sqlite3.Connection, directory: Path, nbytes: int) -> None:
        self._db = db
        self._directory = directory
        self._limit = nbytes

    def bound(self) -> None:
        """Cuts a log that is too long; see `cut`. Call it after each transaction."""
        if log_file_nbytes(self._directory) > 2 * self._limit:
            self.cut()

    def cut(self) -> None:
        """Moves the log into the database and empties its file; blocks for that.

        Does not raise if the log cannot be cut; the next call tries again.
        """
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
        """Returns whether the log is far longer than it should be, since it cannot be moved."""
        return log_file_nbytes(self._directory) > _STUCK * self._limit

    def check(self) -> None:
        """Tries to move a stuck log, which blocks; raises if that fails, so that no write follows.

        Raises:
            IndexFull: it cannot be moved.
        """
        if self.stuck:
            self.bound()
            if self.stuck:
                raise IndexFull(
                    "disk store: the index's log cannot be moved: a process that reads the index "
                    "was stopped, or does not end its transaction"
                )
