"""The allocation of the disk store's slots within its capacity.

Everything here happens inside a write transaction of the index, so that several processes that
share a directory count the same bytes and never take the same slot.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvconnect.backends.disk.damage import whole_numbers
from kvconnect.backends.disk.errors import NO_SPACE
from kvconnect.backends.disk.eviction import TENANT, Eviction
from kvconnect.backends.disk.files.direct_io import Location, aligned_size
from kvconnect.backends.disk.files.owner import owners
from kvconnect.backends.disk.files.segments import SegmentFiles
from kvconnect.backends.disk.format import FOREVER, index_nbytes, log_nbytes
from kvconnect.backends.quotas import Quotas
from kvconnect.backends.url import format_size
from kvconnect.frame import ALIGNMENT
from kvconnect.keys import BlockKey
from kvconnect.trace import count, warn_once

# The size of a segment, the unit that changes from one slot size to another: a sixteenth of the
# capacity, in large stores 1 GiB, but never more than 256 files.
_SEGMENTS_MIN = 16
_SEGMENTS_MAX = 256
_SEGMENT_NBYTES = 1 << 30
# The most tenants that a query names; the first are those furthest above their share.
_MOST_GIVERS = 500
# In very small stores the index must not take the whole capacity.
_INDEX_SHARE = 8


# The number of slot sizes between a power of two and the next, for values shorter than blocks. A
# slot is at most an eighth larger than its value, and there are few kinds of data files.
_STEPS = 8


def slot_size(nbytes: int, frame_sizes: Collection[int]) -> int:
    """Returns the bytes of the slot for a value of `nbytes`.

    Whole blocks, whose frames take one of `frame_sizes`, get slots of just that size. A compressed
    value gets the next larger of a few sizes, at most that of a whole block.
    """
    need = aligned_size(nbytes)
    step = max(ALIGNMENT, (1 << (need.bit_length() - 1)) // _STEPS)
    size = -(-need // step) * step
    return min((whole for whole in frame_sizes if need <= whole <= size), default=size)


@dataclass(frozen=True, slots=True)
class _Segment:
    id: int
    size: int
    used: int | None  # when its newest block was last used; None if it holds none


class SlotAllocator:
    """The allocator of slots; `db` is in a write transaction whenever a method is called.

    Args:
        capacity: bytes of data files and index together.
        quotas: the tenants' shares of it, if any.
        at: called with the name of the point that is reached; tests end the process there.
    """

    def __init__(
        self,
        db: sqlite3.Connection,
        directory: Path,
        files: SegmentFiles,
        *,
        capacity: int,
        quotas: Quotas | None,
        at: Callable[[str], None],
    ) -> None:
        self._db = db
        self.eviction = Eviction(db, quotas)
        self._directory = directory
        self._files = files
        self._capacity = capacity
        self._at = at
        self._grown: list[tuple[int, int]] = []

    def begin(self) -> None:
        """Records that a transaction has begun."""
        self._grown.clear()

    def undo(self, *, alone: bool) -> None:
        """Deletes the data files made in this transaction, which is about to be rolled back.

        If the transaction has ended and is not `alone` any more, only their bytes are freed,
        because another process may use their names by now.
        """
        for segment, size in self._grown:
            if alone:
                self._files.remove(segment, size)
            else:
                self._files.empty(segment)

    def take(
        self,
        size: int,
        wanted: int,
        keep: Collection[BlockKey | None],
        saving: Mapping[bytes, int],
    ) -> list[Location]:
        """Takes up to `wanted` slots of `size` bytes, neighbours where possible, in order.

        Evicts the least recently used blocks for them, but not the blocks `keep`. `saving` has the
        bytes of the whole save, by tenant.
        """
        taken = self._unused(size, wanted)
        if len(taken) < wanted and self.release_stopped():
            taken += self._unused(size, wanted - len(taken))
        while len(taken) < wanted and self._grow(size, wanted - len(taken)):
            taken += self._unused(size, wanted - len(taken))
        if len(taken) < wanted:
            taken += self._reclaim(size, wanted - len(taken), keep, saving)
        return sorted(taken)

    def reserve(self, owner: str, save: int, locations: Iterable[Location]) -> None:
        """Reserves `locations`, just taken, for `owner` until it ends the reservation or stops."""
        self._db.executemany(
            "INSERT INTO reserved VALUES(?, ?, ?, ?)",
            [(owner, save, *location.key) for location in locations],
        )

    def end_reservation(self, owner: str, save: int) -> set[tuple[int, int]]:
        """Ends a reservation; returns its slots that were still reserved, as (segment, slot)."""
        rows = self._db.execute(
            "DELETE FROM reserved WHERE owner=? AND save=? RETURNING segment, slot", (owner, save)
        )
        ended: set[tuple[int, int]] = set(rows.fetchall())
        self.eviction.end_saving(ended)
        return ended

    def free(self, locations: Iterable[tuple[int, int]]) -> None:
        """Frees slots, given as (segment, slot)."""
        self._db.executemany("INSERT OR IGNORE INTO free VALUES(?, ?)", locations)

    def release_stopped(self) -> int:
        """Frees the slots that stopped owners reserved for saves; returns how many."""
        released = self._of_stopped("save > 0")
        self.free(released)
        return len(released)

    def take_unerased(self) -> list[tuple[int, int]]:
        """Ends the reservations of stopped owners that have not overwritten deleted blocks.

        Returns the slots, as (segment, slot): neither free nor reserved.
        """
        return self._of_stopped("save < 0")

    def _of_stopped(self, condition: str) -> list[tuple[int, int]]:
        query = f"SELECT DISTINCT owner FROM reserved WHERE {condition}"  # noqa: S608 - of two
        holders = {owner for (owner,) in self._db.execute(query)}
        stopped = holders - (owners(self._directory) if holders else set())
        query = f"DELETE FROM reserved WHERE owner=? AND {condition} RETURNING segment, slot"  # noqa: S608
        return [slot for owner in stopped for slot in self._db.execute(query, (owner,)).fetchall()]

    def drop_expired(self, before: int, limit: int) -> None:
        """Drops the blocks stored before `before` among the `limit` oldest ones."""
        rows = self._db.execute(
            "DELETE FROM blocks WHERE id IN"
            " (SELECT id FROM blocks WHERE pinned=0 ORDER BY id LIMIT ?)"
            " AND created < ? RETURNING segment, slot",
            (limit, before),
        ).fetchall()
        self.free(rows)

    def drop_ended(self, now: int, limit: int) -> None:
        """Drops up to `limit` blocks whose own time is over at `now`."""
        rows = self._db.execute(
            "DELETE FROM blocks WHERE id IN"  # noqa: S608 - a constant
            f" (SELECT id FROM blocks WHERE expires < {FOREVER} AND expires <= ? AND pinned=0"
            " ORDER BY expires LIMIT ?) RETURNING segment, slot",
            (now, limit),
        ).fetchall()
        self.free(rows)

    def pin(self, keys: Sequence[BlockKey], until: int, most: int) -> set[BlockKey]:
        """Pins stored `keys` while all pinned blocks together take `most` bytes at most.

        The first block that does not fit, and all after it, are not pinned. Returns the pinned
        ones.
        """
        query = "SELECT coalesce(sum(size), 0) FROM blocks WHERE pinned > 0"
        rows: list[tuple[int]] = self._db.execute(query).fetchall()
        ((taken,),) = whole_numbers(rows)
        pinned: set[BlockKey] = set()
        for key in keys:
            row = self._db.execute("SELECT size, pinned FROM blocks WHERE key=?", (key,)).fetchone()
            if row is None:
                continue
            size, before = whole_numbers([row])[0]
            taken += 0 if before else size
            if not before and taken > most:
                break
            self._db.execute("UPDATE blocks SET pinned=? WHERE key=?", (until, key))
            pinned.add(key)
        return pinned

    def unpin(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Ends the pins of `keys`; returns those that were pinned."""
        query = "UPDATE blocks SET pinned=0 WHERE key=? AND pinned > 0"
        return {key for key in keys if self._db.execute(query, (key,)).rowcount}

    def end_pins(self, now: int) -> None:
        """Ends the pins that last until `now` at most."""
        self._db.execute("UPDATE blocks SET pinned=0 WHERE pinned > 0 AND pinned <= ?", (now,))

    def drop_segment(self, segment: int, size: int) -> None:
        """Drops a data file and all blocks in it.

        Its bytes are freed at once, not at the commit. If the commit fails, readers find these
        blocks missing.
        """
        self._files.remove(segment, size)
        for table in ("blocks", "free", "reserved"):
            self._db.execute(f"DELETE FROM {table} WHERE segment=?", (segment,))  # noqa: S608
        self._db.execute("DELETE FROM segments WHERE id=?", (segment,))
        count("store.disk.segment_dropped")

    def empty_segments(self) -> list[tuple[int, int]]:
        """Returns data files without blocks or reserved slots, with the size of their slots."""
        rows: list[tuple[int, int]] = self._db.execute(
            "SELECT id, size FROM segments AS s"
            " WHERE NOT EXISTS (SELECT 1 FROM blocks WHERE segment = s.id)"
            " AND NOT EXISTS (SELECT 1 FROM reserved WHERE segment = s.id)"
        ).fetchall()
        return rows

    def shrink(self) -> None:
        """Drops whole data files, least recently used first, until the capacity suffices.

        Files with pinned blocks are dropped last.
        """
        while self.nbytes() > self._budget():
            # A capacity that was reduced has precedence over pins.
            coldest = self._coldest() or self._coldest(pinned=True)
            if coldest is None:
                break
            self.drop_segment(coldest.id, coldest.size)

    def nbytes(self) -> int:
        """Returns the bytes of all data files."""
        rows: list[tuple[int]] = self._db.execute(
            "SELECT coalesce(sum(size * slots), 0) FROM segments"
        ).fetchall()
        ((total,),) = whole_numbers(rows)
        return total

    def _budget(self) -> int:
        index = index_nbytes(self._directory, log_nbytes(self._capacity))
        index = min(index, self._capacity // _INDEX_SHARE)
        return self._capacity - index

    def _unused(self, size: int, wanted: int) -> list[Location]:
        locations: list[Location] = []
        fresh: list[tuple[int, int, int]] = self._db.execute(
            "SELECT id, fresh, slots FROM segments WHERE size=? AND fresh < slots ORDER BY id",
            (size,),
        ).fetchall()
        for segment, first, slots in whole_numbers(fresh):
            end = min(slots, first + wanted - len(locations))
            locations += [Location(segment, slot, size) for slot in range(first, end)]
            self._db.execute("UPDATE segments SET fresh=? WHERE id=?", (end, segment))
            if len(locations) == wanted:
                return locations
        rows: list[tuple[int, int]] = self._db.execute(
            "SELECT segment, slot FROM segments CROSS JOIN free ON segment = id"
            # Other slots come from a damaged row; a block saved there would not be found.
            " WHERE size=? AND slot >= 0 AND slot < slots ORDER BY id, slot LIMIT ?",
            (size, wanted - len(locations)),
        ).fetchall()
        self._db.executemany("DELETE FROM free WHERE segment=? AND slot=?", rows)
        return locations + [Location(*slot, size) for slot in whole_numbers(rows)]

    def _grow(self, size: int, wanted: int) -> bool:
        """Creates another segment of slots of `size` bytes; returns whether that was possible."""
        total = self.nbytes()
        slots = (self._budget() - total) // size
        if not total and size <= self._capacity:
            slots = max(1, slots)  # a capacity of one block holds one, not counting the index
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
            self._grown.append((segment, size))
            return True
        return False

    def _reclaim(
        self,
        size: int,
        wanted: int,
        keep: Collection[BlockKey | None],
        saving: Mapping[bytes, int],
    ) -> list[Location]:
        """Drops blocks and returns their slots: least recently used first, chains from their end.

        A data file of another slot size is dropped as a whole if all its blocks are older than the
        next ones of this size. With quotas, only blocks of the tenants in `Quotas.givers` are
        dropped.
        """
        locations: list[Location] = []
        usage = self.eviction.usage(saving)
        while len(locations) < wanted:
            givers = self.eviction.givers(usage, self.nbytes(), saving)
            victims = self.eviction.victims(size, wanted - len(locations), keep, givers, usage)
            only = None if givers is None else [tenant for tenant, _ in givers]
            foreign = self._coldest(other_than=size, only=only)
            if foreign and (not victims or (foreign.used or 0) < victims[0].used):
                self.drop_segment(foreign.id, foreign.size)
                if self._grow(size, wanted - len(locations)):
                    locations += self._unused(size, wanted - len(locations))
                usage = self.eviction.usage(saving)
            elif victims:
                self.eviction.drop(victims)
                locations += [victim.location for victim in victims]
            else:
                break
        if locations:
            count("store.disk.evicted", blocks=len(locations))
            self._at("evicted")
        return locations

    def _coldest(
        self, other_than: int = -1, *, pinned: bool = False, only: Sequence[bytes] | None = None
    ) -> _Segment | None:
        """Returns the least recently used segment that no process writes to.

        Unless `pinned`, the segment holds no pinned block. With `only`, it holds blocks of these
        tenants alone.
        """
        others = "0"
        if only is not None:
            only = only[:_MOST_GIVERS]
            others = f"{TENANT} NOT IN ({','.join('?' * len(only))})"
        row = self._db.execute(
            "SELECT id, size, (SELECT max(used) FROM blocks WHERE segment = s.id) AS newest"  # noqa: S608
            " FROM segments AS s WHERE size <> ? AND NOT EXISTS"
            " (SELECT 1 FROM reserved WHERE segment = s.id)"
            " AND (? OR s.id NOT IN (SELECT segment FROM blocks WHERE pinned > 0))"
            f" AND NOT EXISTS (SELECT 1 FROM blocks WHERE segment = s.id AND {others})"
            " ORDER BY newest NULLS FIRST LIMIT 1",
            (other_than, pinned, *(only or ())),
        ).fetchone()
        if row is None:
            return None
        whole_numbers([row if row[2] is not None else row[:2]])
        return _Segment(*row)
