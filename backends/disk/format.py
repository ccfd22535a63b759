"""The disk store's index as a SQLite database, and the mark of a directory of this format."""

from __future__ import annotations

import os
import re
import secrets
import sqlite3
import time
import zlib
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from kvconnect.backends.disk.errors import IndexDamaged, IndexNotOpened, IndexReadOnly, index_errors
from kvconnect.backends.disk.settings import Durability
from kvconnect.errors import ConfigurationError

__all__ = [
    "INDEX_NAME",
    "check_format",
    "connect",
    "connect_read_only",
    "empty_index",
    "has_model_column",
    "index_nbytes",
    "log_file_nbytes",
    "log_nbytes",
    "make_index",
    "set_aside",
    "write_format",
]

FORMAT = 1
_FORMAT_NAME = "FORMAT"

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
# SQLite moves the write-ahead log into the database at so many pages; see `IndexLog`, too.
_LOG_PAGES = 4096
_LOG_PAGES_MIN = 16
_PAGE = 4096
_CACHE_KIB = 32 << 10


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

    Its log is moved into it at `log` bytes, and cut to so many when it starts over.

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
            db.execute(f"PRAGMA wal_autocheckpoint={log // _PAGE}")
            db.execute(f"PRAGMA journal_size_limit={log}")
            db.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
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
        # it can read the database only if there is nothing in the log, and no process writes.
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


def empty_index() -> sqlite3.Connection:
    """An index in memory, in which nothing is stored."""
    db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    _make_schema(db)
    return db


def has_model_column(db: sqlite3.Connection) -> bool:
    """Whether blocks have a model. Not if only an older version has written to the index."""
    return any(name == "model" for _, name, *_ in db.execute("PRAGMA table_info(blocks)"))


def _make_schema(db: sqlite3.Connection) -> None:
    for statement in _SCHEMA.rstrip().split(";\n"):
        db.execute(statement)
    db.execute(f"PRAGMA user_version={_SCHEMA_VERSION}")


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


def _format_text(number: int) -> bytes:
    text = b"kvconnect disk store, format %d" % number
    return text + b", check %08x\n" % zlib.crc32(text)


def check_format(path: Path) -> None:
    """Refuse a directory of another format. A damaged mark says nothing, and is written again."""
    try:
        text = (path / _FORMAT_NAME).read_bytes()
    except FileNotFoundError:
        return
    match = re.match(rb"kvconnect disk store, format (\d{1,9}),", text)
    if match and int(match[1]) != FORMAT and text == _format_text(int(match[1])):
        raise ConfigurationError(
            f"disk store: '{path}' has format {int(match[1])}, this version reads format {FORMAT}; "
            f"give another directory, or delete this one"
        )


def write_format(path: Path) -> None:
    """Mark the directory `path` as one of this format."""
    mark = path / _FORMAT_NAME
    if not mark.exists() or mark.read_bytes() != _format_text(FORMAT):
        mark.write_bytes(_format_text(FORMAT))
