"""The queries that find blocks of the disk store in the index."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, TypeVar

from kvconnect.backend import MAX_CHILDREN, Child, StoredEntry
from kvconnect.backends.disk.damage import whole_numbers
from kvconnect.backends.disk.errors import IndexDamaged, index_errors
from kvconnect.backends.disk.files.direct_io import Location
from kvconnect.backends.disk.format import FOREVER, has_column
from kvconnect.backends.entries import tokens_from_bytes
from kvconnect.keys import KEY_NBYTES, BlockKey
from kvconnect.tokens import TokenArray

T = TypeVar("T")

_VALUES_PER_QUERY = 512
_ROWS_PER_PAGE = 1024
# The blocks `b` that have not expired; its values are those of `valid`. The plus keeps SQLite from
# looking for an index for the OR, which costs a third of the time of a lookup.
_VALID = "+(b.created >= ? AND b.expires > ? OR b.pinned > ?)"
# The blocks `b` that can be read: a damaged row must not lead outside of its segment `s`.
READABLE = (
    " FROM blocks AS b JOIN segments AS s ON s.id = b.segment WHERE b.slot >= 0"
    f" AND b.slot < s.slots AND b.length >= 0 AND b.length <= s.size AND {_VALID} AND b.key IN "
)
# All blocks in one row, because for each row the thread releases the interpreter's lock and waits
# for it. `quote` leaves only numbers without quotes.
_FIND = (
    "SELECT group_concat(hex(b.key) || ' ' || quote(b.id) || ' ' || quote(b.segment) || ' ' ||"
    " quote(b.slot) || ' ' || quote(s.size) || ' ' || quote(b.length))" + READABLE
)


def microseconds() -> int:
    """Returns the time in the unit of the index."""
    return time.time_ns() // 1000


@dataclass(frozen=True, slots=True)
class Located(Location):
    """The slot of a stored block: its row `id` is deleted before the slot may be overwritten.

    Attributes:
        id: the number of its row.
        length: the bytes of the block.
    """

    id: int
    length: int


def oldest_valid(ttl: float | None) -> int:
    """Returns the earliest time of storing that has not expired yet."""
    return -(1 << 62) if ttl is None else microseconds() - int(ttl * 1e6)


def valid(ttl: float | None) -> tuple[int, int, int]:
    """Returns the values of a query for blocks that have not expired: pinned ones never do."""
    now = microseconds()
    return oldest_valid(ttl), now, now


def in_parts(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yields `values` in parts that fit into one query."""
    for start in range(0, len(values), _VALUES_PER_QUERY):
        yield values[start : start + _VALUES_PER_QUERY]


def marks(values: Iterable[object]) -> str:
    """Returns the question marks after the ``IN`` of a query."""
    return f"({','.join('?' for _ in values)})"


class IndexReader:
    """The queries of the index. Thread-safe; they wait for no writer.

    Args:
        ttl: seconds after which a stored block counts as absent; ``None``: never.

    Raises:
        BackendUnavailable, IndexDamaged: `db` is closed.
    """

    def __init__(self, db: sqlite3.Connection, ttl: float | None) -> None:
        self._db = db
        self._ttl = ttl
        self._lock = threading.Lock()
        try:
            with index_errors():
                model = "b.model" if has_column(db, "model") else "x''"
                hits = "b.hits" if has_column(db, "hits") else "NULL"
                self._lacks = _lacking(db)
        except BaseException:
            db.close()
            raise
        self._entry_columns = (
            "b.id, b.key, b.length, b.priority, b.created, b.used, b.parent, b.tokens, b.namespace,"
            f" b.pool_group, {model}, b.expires, b.pinned, {hits}"
        )

    def find(self, keys: Sequence[BlockKey]) -> list[Located]:
        """Returns the leading ones of `keys` that are stored."""
        found: list[Located] = []
        for part in in_parts(keys):
            ((rows,),) = self._rows(_FIND + marks(part), (*valid(self._ttl), *part))
            by_key = dict(map(_located, rows.split(","))) if rows else {}
            for key in part:
                if key not in by_key:
                    return found
                found.append(by_key[key])
        return found

    def alive(self, blocks: Sequence[Located]) -> int:
        """Returns how many leading `blocks` are still stored, in slots that were not reused."""
        ids = [block.id for block in blocks]
        count = "SELECT count(*) FROM blocks WHERE id IN "
        counts = [self._rows(count + marks(part), part)[0][0] for part in in_parts(ids)]
        if sum(counts) == len(ids):
            return len(ids)
        query = "SELECT id FROM blocks WHERE id IN "
        alive = {
            block for part in in_parts(ids) for (block,) in self._rows(query + marks(part), part)
        }
        return next((at for at, block in enumerate(ids) if block not in alive), len(ids))

    def children(self, key: BlockKey | None) -> list[Child]:
        """Returns the blocks with tokens whose parent is `key`, the last `MAX_CHILDREN` of them."""
        rows = self._rows(
            "SELECT b.key, b.tokens FROM blocks AS b"  # noqa: S608 - of constants
            " WHERE b.parent IS ? AND b.tokens IS NOT NULL"
            f" AND {_VALID} ORDER BY b.id DESC LIMIT ?",
            (key, *valid(self._ttl), MAX_CHILDREN),
        )
        children = ((child, _tokens(tokens)) for child, tokens in rows)
        return [Child(BlockKey(child), tokens) for child, tokens in children if tokens is not None]

    def page(self, after: int) -> tuple[int, list[StoredEntry]]:
        """Returns entries of blocks with ids above `after`, and before them the last id.

        At the end there are no entries, and the id is `after`.
        """
        rows = self._rows(
            f"SELECT {self._entry_columns} FROM blocks AS b"  # noqa: S608 - names of columns
            f" WHERE b.id > ? AND {_VALID} ORDER BY b.id LIMIT ?",
            (after, *valid(self._ttl), _ROWS_PER_PAGE),
        )
        entries = [_entry(*row[1:]) for row in rows]
        return (rows[-1][0] if rows else after), [entry for entry in entries if entry is not None]

    def describe(self, keys: Sequence[BlockKey]) -> list[StoredEntry | None]:
        """Returns the entry that `page` would list for each of `keys`."""
        entries: dict[BlockKey, StoredEntry | None] = {}
        for part in in_parts(keys):
            rows = self._rows(
                f"SELECT {self._entry_columns} FROM blocks AS b"  # noqa: S608 - the same
                f" WHERE {_VALID} AND b.key IN " + marks(part),
                (*valid(self._ttl), *part),
            )
            entries.update((row[1], _entry(*row[1:])) for row in rows)
        return [entries.get(key) for key in keys]

    def totals(self) -> dict[str, float]:
        """Returns ``blocks``, their ``bytes`` in slots, and ``file_bytes`` of all data files."""
        count = "SELECT count(*), coalesce(sum(size), 0) FROM blocks"
        ((blocks, nbytes),) = whole_numbers(self._rows(count, ()))
        total = "SELECT coalesce(sum(size * slots), 0) FROM segments"
        ((files,),) = whole_numbers(self._rows(total, ()))
        pinned = (
            "SELECT count(*), coalesce(sum(b.size), 0) FROM blocks AS b"
            " WHERE b.pinned > 0 AND b.pinned > ?"
        )
        ((pins, pinned_nbytes),) = whole_numbers(self._rows(pinned, (microseconds(),)))
        return {
            "blocks": blocks,
            "bytes": nbytes,
            "file_bytes": files,
            "pinned_blocks": pins,
            "pinned_bytes": pinned_nbytes,
        }

    def close(self) -> None:
        """Closes the connection."""
        with self._lock:
            self._db.close()

    def _rows(self, query: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        with self._lock, index_errors():
            if self._lacks:  # a newer version may have added them since
                self._lacks = _lacking(self._db)
            for column, default in self._lacks.items():
                query = query.replace(column, default)
            return self._db.execute(query, values).fetchall()


def _lacking(db: sqlite3.Connection) -> dict[str, str]:
    """Returns the columns that an index of an older version lacks, with the value of all blocks."""
    defaults = {"pinned": "0", "expires": str(FOREVER)}
    return {f"b.{name}": value for name, value in defaults.items() if not has_column(db, name)}


def _located(shown: str) -> tuple[bytes, Located]:
    """Returns a block of the query `_FIND`, with its key.

    Raises:
        IndexDamaged: a program wrote to an index of an older version while it was open.
    """
    key, *numbers = shown.split(" ")
    try:
        block, segment, slot, size, length = map(int, numbers)
        return bytes.fromhex(key), Located(segment, slot, size, id=block, length=length)
    except ValueError as error:
        raise IndexDamaged(f"{shown!r:.100} stands where numbers belong") from error


def _entry(key: Any, *columns: Any) -> StoredEntry | None:
    """Returns the entry of a row; ``None`` if the row is damaged, which must not end a listing."""
    length, priority, created, used, parent, tokens, namespace, group, model, *counts = columns
    expires, pinned, hits = counts
    numbers = (length, priority, created, used, group, pinned, expires)
    if not _is_key(key) or not all(isinstance(number, int) for number in numbers):
        return None
    return StoredEntry(
        key=BlockKey(key),
        nbytes=length,
        priority=priority,
        created_at=created / 1e6,
        used_at=used / 1e6,
        parent=BlockKey(parent) if _is_key(parent) else None,
        tokens=_tokens(tokens),
        namespace=namespace if isinstance(namespace, bytes) else b"",
        model=model if isinstance(model, bytes) else b"",
        group=group,
        pinned_until=inf if pinned >= FOREVER else pinned / 1e6 if pinned > microseconds() else 0.0,
        hits=hits if isinstance(hits, int) else None,
        expires_at=None if expires >= FOREVER else expires / 1e6,
    )


def _is_key(stored: object) -> bool:
    return isinstance(stored, bytes) and len(stored) == KEY_NBYTES


def _tokens(stored: object) -> TokenArray | None:
    if isinstance(stored, bytes) and len(stored) % 4 == 0:
        return tokens_from_bytes(stored)
    return None
