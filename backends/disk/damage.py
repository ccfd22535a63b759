"""The checks for damage to the disk store's index that SQLite does not notice.

Tables that are `STRICT` refuse values of another type. Those of an older version take any, and
an edit of the database by hand can change what a table is.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import TypeVar

from kvconnect.backends.disk.errors import IndexDamaged

T = TypeVar("T", bound=tuple[object, ...])

_NUMBER, _TEXT, _BYTES, _BYTES_OR_NULL = "integer", "text", "blob", "blob or null"
_COLUMNS = {
    "segments": {"id": _NUMBER, "size": _NUMBER, "slots": _NUMBER, "fresh": _NUMBER},
    "free": {"segment": _NUMBER, "slot": _NUMBER},
    "reserved": {"owner": _TEXT, "save": _NUMBER, "segment": _NUMBER, "slot": _NUMBER},
    "blocks": {
        "id": _NUMBER,
        "key": _BYTES,
        "segment": _NUMBER,
        "slot": _NUMBER,
        "size": _NUMBER,
        "length": _NUMBER,
        "priority": _NUMBER,
        "created": _NUMBER,
        "used": _NUMBER,
        "parent": _BYTES_OR_NULL,
        "tokens": _BYTES_OR_NULL,
        "namespace": _BYTES,
        "pool_group": _NUMBER,
        "model": _BYTES,
        "pinned": _NUMBER,
        "hits": _NUMBER,
        "expires": _NUMBER,
    },
}
# An older version's blocks have none of these.
_OPTIONAL = {("blocks", column) for column in ("model", "pinned", "hits", "expires")}
_WRONG = {
    _NUMBER: "typeof({0}) <> 'integer'",
    _TEXT: "typeof({0}) <> 'text'",
    _BYTES: "typeof({0}) <> 'blob'",
    _BYTES_OR_NULL: "typeof({0}) NOT IN ('blob', 'null')",
}
# A new row's number is one above the last, so no block can be saved once the numbers are exhausted.
_VALUES = {
    "segments.id": "SELECT 1 FROM segments WHERE id > 1 << 62 LIMIT 1",
    "blocks.id": "SELECT 1 FROM blocks WHERE id > 1 << 62 LIMIT 1",
    "segments.fresh": "SELECT 1 FROM segments WHERE fresh < 0",
    "sqlite_sequence.seq": (
        "SELECT 1 FROM sqlite_sequence"
        " WHERE typeof(seq) <> 'integer' OR seq NOT BETWEEN 0 AND 1 << 62"
    ),
    # A slot of two blocks, or a free slot with a block: saving one block would overwrite the other.
    "blocks.slot": (
        "SELECT 1 FROM (SELECT segment, slot FROM blocks UNION ALL SELECT segment, slot FROM free"
        " UNION ALL SELECT segment, slot FROM reserved)"
        " GROUP BY segment, slot HAVING count(*) > 1 LIMIT 1"
    ),
    "blocks.segment": (
        "SELECT 1 FROM blocks JOIN segments ON segments.id = segment WHERE slot >= fresh LIMIT 1"
    ),
}


def expect_schema(db: sqlite3.Connection) -> None:
    """Raises if tables or columns are missing, or if a trigger, view or unique index was added.

    Raises:
        IndexDamaged: names the first such difference.
        sqlite3.Error: the database cannot be read.
    """
    for table, columns in _COLUMNS.items():
        missing = columns.keys() - _columns(db, table)
        for column in sorted(missing):
            if (table, column) not in _OPTIONAL:
                raise IndexDamaged(f"{table} has no column {column}")
        # A row that one of these rejects would count as stored.
        query = "SELECT name FROM pragma_index_list(?) WHERE \"unique\" AND origin = 'c'"
        for (name,) in db.execute(query, (table,)).fetchall():
            raise IndexDamaged(f"there is an index {name!r}, which is none of its own")
    query = "SELECT type, name FROM sqlite_schema WHERE type IN ('trigger', 'view')"
    for kind, name in db.execute(query).fetchall():
        raise IndexDamaged(f"there is a {kind} {name!r}, which is none of its own")


def expect_sound(db: sqlite3.Connection) -> None:
    """Raises if a value is not one that this code writes. Reads all rows.

    Raises:
        IndexDamaged: names the column of such a value.
        sqlite3.Error: the database cannot be read.
    """
    listed = db.execute("PRAGMA table_list").fetchall()  # an older SQLite lists none
    strict = {name for _, name, _, _, _, is_strict in listed if is_strict}
    for table in _COLUMNS.keys() - strict:
        _expect_types(db, table)
    for column, query in _VALUES.items():
        if db.execute(query).fetchall():
            raise _bad_value(column)


def whole_numbers(rows: Sequence[T]) -> Sequence[T]:
    """Returns `rows` if all values in them are whole numbers.

    Raises:
        IndexDamaged: a value is none: a program wrote to an index of an older version while it was
            open.
    """
    for row in rows:
        for value in row:
            if not isinstance(value, int):
                raise IndexDamaged(f"{value!r:.40} stands where a number belongs")
    return rows


def _expect_types(db: sqlite3.Connection, table: str) -> None:
    there = _columns(db, table)
    wrong = " ".join(
        f"WHEN {_WRONG[kind].format(column)} THEN '{column}'"
        for column, kind in _COLUMNS[table].items()
        if column in there
    )
    query = f"SELECT CASE {wrong} END AS odd FROM {table} WHERE odd IS NOT NULL LIMIT 1"  # noqa: S608 - names of columns
    for (column,) in db.execute(query).fetchall():
        raise _bad_value(f"{table}.{column}")


def _bad_value(column: str) -> IndexDamaged:
    return IndexDamaged(f"a value of {column} is none that belongs there")


def _columns(db: sqlite3.Connection, table: str) -> set[str]:
    return {name for _, name, *_ in db.execute(f"PRAGMA table_info({table})").fetchall()}
