"""Slots of the disk store: taking them, within the capacity, and giving them back.

Everything here happens inside a write transaction of the index, so that several processes that
share a directory count the same bytes and never take the same slot.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from kvconnect.backends.disk_owner import owners
from kvconnect.backends.disk_schema import index_nbytes
from kvconnect.backends.disk_segments import NO_SPACE, Place, SegmentFiles
from kvconnect.backends.url import format_size
from kvconnect.keys import BlockKey
from kvconnect.trace import count, warn_once

__all__ = ["SlotAllocator"]

# A segment is the unit that goes from one slot size to another: a sixteenth of the capacity, and in
# large stores 1 GiB, but never more than 256 open files.
_SEGMENTS_MIN = 16
_SEGMENTS_MAX = 256
_SEGMENT_NBYTES = 1 << 30
# In very small stores the index must not take all the room there is.
_INDEX_SHARE = 8


@dataclass(frozen=True, slots=True)
class _Segment:
    id: int
    size: int
    used: int | None  # when its newest block was last used; None if it holds none


class SlotAllocator:
    """Takes and frees slots; `db` is in a write transaction whenever a method is called.

    Args:
        capacity: bytes of data files and index together.
        at: called with the name of the point that is reached; tests end the process there.
    """

    def __init__(
        self,
        db: sqlite3.Connection,
        directory: Path,
        files: SegmentFiles,
        *,
        capacity: int,
        at: Callable[[str], None],
    ) -> None:
        self._db = db
        self._directory = directory
        self._files = files
        self._capacity = capacity
        self._at = at

    def take(
        self, size: int, wanted: int, owner: str, keep: Collection[BlockKey | None]
    ) -> list[Place]:
        """Up to `wanted` slots of `size` bytes, reserved for `owner`, neighbours where possible.

        Drops what was used longest ago for them, but not the blocks `keep`.
        """
        taken = self._unused(size, wanted)
        if len(taken) < wanted and self.release_dead():
            taken += self._unused(size, wanted - len(taken))
        while len(taken) < wanted and self._grow(size, wanted - len(taken)):
            taken += self._unused(size, wanted - len(taken))
        if len(taken) < wanted:
            taken += self._reclaim(size, wanted - len(taken), keep)
        self._db.executemany(
            "INSERT INTO reserved VALUES(?, ?, ?)",
            [(place.segment, place.slot, owner) for place in taken],
        )
        return sorted(taken)

    def end_reservation(self, place: Place, owner: str) -> bool:
        """Whether `place` was still reserved for `owner`; it is not any more."""
        done = self._db.execute(
            "DELETE FROM reserved WHERE segment=? AND slot=? AND owner=?",
            (place.segment, place.slot, owner),
        )
        return done.rowcount == 1

    def free(self, places: Iterable[tuple[int, int]]) -> None:
        """Give back slots, as (segment, slot)."""
        self._db.executemany("INSERT OR IGNORE INTO free VALUES(?, ?)", places)

    def release_dead(self) -> int:
        """Give back what dead owners have reserved; return how many slots."""
        holders = self._db.execute("SELECT DISTINCT owner FROM reserved").fetchall()
        dead = {owner for (owner,) in holders} - (owners(self._directory) if holders else set())
        released = 0
        for owner in dead:
            self._db.execute(
                "INSERT OR IGNORE INTO free SELECT segment, slot FROM reserved WHERE owner=?",
                (owner,),
            )
            released += self._db.execute("DELETE FROM reserved WHERE owner=?", (owner,)).rowcount
        return released

    def drop_expired(self, before: int, limit: int) -> None:
        """Drop up to `limit` blocks that were stored before `before`."""
        rows = self._db.execute(
            "DELETE FROM blocks WHERE id IN (SELECT id FROM blocks WHERE created < ? LIMIT ?)"
            " RETURNING segment, slot",
            (before, limit),
        ).fetchall()
        self.free(rows)

    def drop_segment(self, segment: int, size: int) -> None:
        """Drop a data file and all blocks in it.

        Its bytes are free now, not at the commit: if that never comes, the blocks are found missing
        when they are read.
        """
        self._files.remove(segment, size)
        for table in ("blocks", "free", "reserved"):
            self._db.execute(f"DELETE FROM {table} WHERE segment=?", (segment,))  # noqa: S608
        self._db.execute("DELETE FROM segments WHERE id=?", (segment,))
        count("store.disk.segment_dropped")

    def shrink(self) -> None:
        """Drop whole data files, longest unused first, until the capacity is kept."""
        while self.nbytes() > self._budget():
            coldest = self._coldest()
            if coldest is None:
                break
            self.drop_segment(coldest.id, coldest.size)

    def nbytes(self) -> int:
        """Bytes of all data files."""
        (total,) = self._db.execute(
            "SELECT coalesce(sum(size * slots), 0) FROM segments"
        ).fetchone()
        return int(total)

    def _budget(self) -> int:
        index = min(index_nbytes(self._directory), self._capacity // _INDEX_SHARE)
        return self._capacity - index

    def _unused(self, size: int, wanted: int) -> list[Place]:
        places: list[Place] = []
        fresh = self._db.execute(
            "SELECT id, fresh, slots FROM segments WHERE size=? AND fresh < slots ORDER BY id",
            (size,),
        ).fetchall()
        for segment, first, slots in fresh:
            end = min(slots, first + wanted - len(places))
            places += [Place(segment, slot, size) for slot in range(first, end)]
            self._db.execute("UPDATE segments SET fresh=? WHERE id=?", (end, segment))
            if len(places) == wanted:
                return places
        rows = self._db.execute(
            "SELECT segment, slot FROM free WHERE segment IN (SELECT id FROM segments WHERE size=?)"
            " ORDER BY segment, slot LIMIT ?",
            (size, wanted - len(places)),
        ).fetchall()
        self._db.executemany("DELETE FROM free WHERE segment=? AND slot=?", rows)
        return places + [Place(segment, slot, size) for segment, slot in rows]

    def _grow(self, size: int, wanted: int) -> bool:
        """Whether there is another segment of slots of `size` bytes."""
        total = self.nbytes()
        slots = (self._budget() - total) // size
        if not total:
            slots = max(1, slots)  # a capacity of one block holds one, whatever the index takes
        nbytes = min(_SEGMENT_NBYTES, self._capacity // _SEGMENTS_MIN)
        slots = min(slots, max(1, nbytes // size, self._capacity // _SEGMENTS_MAX // size))
        while slots > 0:
            row = self._db.execute(
                "INSERT INTO segments(size, slots, fresh) VALUES(?, ?, 0)", (size, slots)
            )
            segment = int(row.lastrowid or 0)
            try:
                self._files.create(segment, size, slots)
            except OSError as error:
                self._db.execute("DELETE FROM segments WHERE id=?", (segment,))
                if error.errno not in NO_SPACE:
                    raise
                warn_once(
                    f"disk.full.{self._directory}",
                    f"disk store {self._directory}: no space to grow beyond {format_size(total)} "
                    f"({error.strerror}); it drops older blocks instead",
                )
                slots //= 2
                continue
            return True
        return False

    def _reclaim(self, size: int, wanted: int, keep: Collection[BlockKey | None]) -> list[Place]:
        """Slots of blocks that are dropped: longest unused first, chains from their end.

        A data file of another slot size goes as a whole, if all in it is older than what is here.
        """
        places: list[Place] = []
        foreign = self._coldest(other_than=size)
        while len(places) < wanted:
            victim = self._oldest_leaf(size, keep)
            if foreign and (victim is None or foreign.used is None or foreign.used < victim[-1]):
                self.drop_segment(foreign.id, foreign.size)
                foreign = self._coldest(other_than=size)
                if self._grow(size, wanted - len(places)):
                    places += self._unused(size, wanted - len(places))
            elif victim is not None:
                places.append(self._drop(victim, size))
            else:
                break
        if places:
            count("store.disk.evicted", blocks=len(places))
            self._at("evicted")
        return places

    def _oldest_leaf(
        self, size: int, keep: Collection[BlockKey | None]
    ) -> tuple[int, int, int, bytes | None, int] | None:
        rows = self._db.execute(
            "SELECT key, id, segment, slot, parent, used FROM blocks AS b WHERE size=?"
            " AND NOT EXISTS (SELECT 1 FROM blocks WHERE parent = b.key) ORDER BY priority, used",
            (size,),
        )
        for key, *victim in rows:
            if key not in keep:
                rows.close()
                return tuple(victim)
        return None

    def _drop(self, victim: tuple[int, int, int, bytes | None, int], size: int) -> Place:
        block, segment, slot, parent, used = victim
        self._db.execute("DELETE FROM blocks WHERE id=?", (block,))
        if parent is not None:
            # Its child was used, so it was; and now it is the end of the chain.
            self._db.execute(
                "UPDATE blocks SET used=? WHERE key=? AND used < ?", (used + 1, parent, used)
            )
        return Place(segment, slot, size)

    def _coldest(self, other_than: int = -1) -> _Segment | None:
        """The segment that was not used for longest and that nobody writes to."""
        row = self._db.execute(
            "SELECT id, size, (SELECT max(used) FROM blocks WHERE segment = s.id) AS newest"
            " FROM segments AS s WHERE size <> ? AND NOT EXISTS"
            " (SELECT 1 FROM reserved WHERE segment = s.id) ORDER BY newest NULLS FIRST LIMIT 1",
            (other_than,),
        ).fetchone()
        return None if row is None else _Segment(*row)
