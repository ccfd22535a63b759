"""The bytes in slots that no stored block has: those of blocks that were dropped."""

from __future__ import annotations

import sqlite3

from kvconnect.backends.disk.damage import whole_numbers
from kvconnect.backends.disk.files.direct_io import Location, aligned_size
from kvconnect.frame import ALIGNMENT

# The bytes that one transaction overwrites while others wait.
_NBYTES = 16 << 20
_ROWS = 256
_BEGIN: tuple[tuple[int, int], int, int | None] = (0, -1), 0, None
_FREE = (
    "SELECT segment, slot, size FROM free JOIN segments ON id = segment"
    " WHERE (segment, slot) > (?, ?) AND slot >= 0 AND slot < slots ORDER BY segment, slot LIMIT ?"
)
# `aligned_size` in SQL, which divides whole numbers without the rest.
_ALIGNED = f"(max(b.length, 1) + {ALIGNMENT - 1}) / {ALIGNMENT} * {ALIGNMENT}"
_LONGER = (
    "SELECT b.id, b.segment, b.slot, s.size, b.length FROM blocks AS b"  # noqa: S608 - of constants
    " JOIN segments AS s ON s.id = b.segment WHERE b.id > ? AND b.id <= ?"
    " AND b.slot >= 0 AND b.slot < s.slots"
    f" AND b.length >= 0 AND {_ALIGNED} < s.size ORDER BY b.id LIMIT ?"
)


class Leftovers:
    """Iterates over free slots, and over the unused ends of slots with shorter blocks.

    Args:
        db: the index's connection, which must be in a write transaction when a method is called.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._slot, self._block, self._last = _BEGIN

    def following(self) -> list[tuple[Location, int]]:
        """Returns the next slots, each with the offset from which on its bytes are unused.

        Returns none at the end; the call after that begins anew.
        """
        found: list[tuple[Location, int]] = []
        nbytes = 0
        for segment, slot, size in whole_numbers(
            self._db.execute(_FREE, (*self._slot, _ROWS)).fetchall()
        ):
            found.append((Location(segment, slot, size), 0))
            self._slot = segment, slot
            if (nbytes := nbytes + size) >= _NBYTES:
                break
        if found:
            return found
        if self._last is None:  # only present blocks, because new ones may be added without end
            last = self._db.execute("SELECT coalesce(max(id), 0) FROM blocks").fetchall()
            ((self._last,),) = whole_numbers(last)
        bounds = self._block, self._last, _ROWS
        rows = whole_numbers(self._db.execute(_LONGER, bounds).fetchall())
        for self._block, segment, slot, size, length in rows:
            found.append((Location(segment, slot, size), aligned_size(length)))
        if not found:
            self._slot, self._block, self._last = _BEGIN
        return found
