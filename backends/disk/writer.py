"""The writer of the disk store's index: saves, deletes, times of use, cleaning up."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from kvconnect.backend import StoredBlock
from kvconnect.backends.disk.damage import expect_schema, expect_sound, whole_numbers
from kvconnect.backends.disk.errors import IndexConnectionLost, IndexDamaged, index_errors
from kvconnect.backends.disk.files.direct_io import Location
from kvconnect.backends.disk.files.owner import Owner, owners
from kvconnect.backends.disk.files.segments import SegmentFiles
from kvconnect.backends.disk.find import (
    READABLE,
    in_parts,
    marks,
    microseconds,
    oldest_valid,
    valid,
)
from kvconnect.backends.disk.format import FOREVER, IndexLog, connect, log_nbytes, make_index
from kvconnect.backends.disk.leftovers import Leftovers
from kvconnect.backends.disk.path import identity, log_identity
from kvconnect.backends.disk.rows import INSERT, Reservation, row_of
from kvconnect.backends.disk.settings import DiskSettings
from kvconnect.backends.disk.slots import SlotAllocator, slot_size
from kvconnect.backends.disk.use_clock import UseClock
from kvconnect.backends.quotas import tenant_of
from kvconnect.keys import BlockKey

_EXPIRED_PER_SAVE = 256
_EXPIRED_AT_OPEN = 16384
# Seconds between two checks for damage while the index is open.
_CHECK_S = 60.0


class IndexWriter:
    """The write transactions, one at a time. Thread-safe; each waits for other processes' ones.

    A save has two transactions: `reserve` takes slots, then the payload is written, then `commit`
    makes it visible. Each transaction fails if the directory's index is no longer the open one.

    No cursor may outlive the lock, not even in a local variable of a function that returns: that of
    an `executemany` keeps the statement that the connection caches (CPython 3.11), and resets it
    when it is collected, while the next thread uses it. SQLite calls that misuse.

    Attributes:
        identity, log_identity: the identities of the index that is open.
        use_clock: stamps the use of blocks.

    Raises:
        BackendUnavailable: the index cannot be written; the transaction had no effect.
        IndexDamaged: the index is not what this code wrote.
        OSError: a data file failed; the transaction had no effect.
    """

    def __init__(
        self,
        settings: DiskSettings,
        files: SegmentFiles,
        *,
        capacity: int,
        at: Callable[[str], None],
    ) -> None:
        self._directory = directory = settings.path
        self._settings = settings
        self._files = files
        self._at = at
        self._lock = threading.Lock()
        self._saves = 0
        # Saves that failed, and erasures: the next transaction frees their slots.
        self._over: set[int] = set()
        self._check_at = 0.0
        log = log_nbytes(capacity)
        make_index(directory)
        self.identity = identity(directory)
        self._db = connect(directory, settings.durability, log)
        self.log_identity = log_identity(directory)
        self._slots = SlotAllocator(
            self._db, directory, files, capacity=capacity, quotas=settings.quotas, at=at
        )
        self._leftovers = Leftovers(self._db)
        self._log = IndexLog(self._db, directory, log)
        with ExitStack() as opened:
            opened.callback(self._db.close)
            with index_errors():
                expect_sound(self._db)
            with self._transaction():
                self._owner = Owner(directory)
                opened.callback(self._owner.close)
                self._slots.eviction.prepare()
                self.use_clock = UseClock(self._db)
            opened.pop_all()

    def clean(self, *, shrink: bool) -> None:
        """Removes what killed processes left; with `shrink` also what exceeds the capacity."""
        with self._transaction():
            owners(self._directory)  # removes the files of the stopped, which may hold nothing
            self._slots.release_stopped()
            for segment, size, slots in self._segments():
                if not self._files.intact(segment, size, slots):
                    self._slots.drop_segment(segment, size)
            self._files.remove_strays({segment for segment, *_ in self._segments()})
            self._slots.end_pins(microseconds())
            self._drop_expired(_EXPIRED_AT_OPEN)
            if shrink:
                self._slots.shrink()

    def reserve(self, blocks: Sequence[StoredBlock]) -> Reservation:
        """Reserves slots for the blocks that are not stored, dropping older ones where needed.

        Raises:
            IndexFull: the index's log cannot be moved, and would grow without end.
        """
        with self._lock, index_errors():
            self._log.check()
        with self._transaction():
            self.use_clock.follow(self._db)
            now = self.use_clock.now()
            self._files.keep_only({segment for segment, *_ in self._segments()})
            self._slots.end_pins(microseconds())
            self._drop_expired(_EXPIRED_PER_SAVE)
            present = self._present([block.key for block in blocks])
            stamps = ((now - at, block.key) for at, block in enumerate(blocks))
            self._db.executemany(
                "UPDATE blocks SET used=? WHERE key=?",
                [(stamp, key) for stamp, key in stamps if key in present],
            )
            reservation = self._take(blocks, present)
        self._at("reserved")
        return reservation

    def commit(self, reservation: Reservation) -> int:
        """Makes written blocks visible; returns how many leading blocks of the save are stored."""
        now, used = microseconds(), self.use_clock.now()
        with self._transaction():
            ours = self._slots.end_reservation(self._owner.name, reservation.save)
            # If this process looked stopped, another one may have taken the slots.
            new = [entry for entry in reservation.new if entry[2].key in ours]
            rows = [row_of(now, used, *entry) for entry in new]
            inserted = self._db.executemany(INSERT, rows).rowcount
            if inserted < len(new):  # another process has stored some meanwhile
                expect_schema(self._db)  # or the index rejects them
                self._slots.free(self._rowless([location.key for _, _, location in new]))
            self._at("committing")
        lost = (at for at, _, location in reservation.new if location.key not in ours)
        return next(lost, reservation.count)

    def release(self, reservation: Reservation) -> None:
        """Frees the slots of a save that failed; if it fails, too, a later call does."""
        self._over.add(reservation.save)
        with self._transaction():
            pass

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Deletes `keys`; absent ones are no error.

        Callers also delete damaged blocks. If another block has the same slot, the index is
        damaged, since saving one would overwrite the other.
        """
        with self._transaction():
            self._slots.free(self._alone(self._deleted(keys)))

    def erase(self, keys: Sequence[BlockKey] = ()) -> None:
        """Deletes `keys` like `delete`, and overwrites their slots with zeros before they are free.

        Until then the slots are reserved. Slots that a killed process left in that state are
        overwritten, too.

        Raises:
            OSError: a slot could not be overwritten; the blocks are deleted, their slots reserved.
        """
        with self._transaction():
            sizes = {segment: (size, slots) for segment, size, slots in self._segments()}
            left = [*self._alone(self._deleted(keys)), *self._slots.take_unerased()]
            empty = {segment for segment, _ in self._slots.empty_segments()}
            for segment in empty & {segment for segment, _ in left}:
                self._slots.drop_segment(segment, sizes[segment][0])
            found = [
                Location(segment, slot, sizes[segment][0])
                for segment, slot in whole_numbers(left)
                if segment in sizes and segment not in empty and 0 <= slot < sizes[segment][1]
            ]
            self._saves += 1
            erasure = -self._saves  # negative, unlike the number of a save
            self._slots.reserve(self._owner.name, erasure, found)
        if not found:
            return
        self._at("erasing")
        self._files.zero([(location, 0) for location in found])
        self._over.add(erasure)
        with self._transaction():
            pass

    def scrub(self) -> bool:
        """Overwrites some bytes in unused slots; returns whether more may be left.

        Other writes wait meanwhile.

        Raises:
            OSError: any of these bytes may have been overwritten.
        """
        with self._transaction():
            left = self._leftovers.following()
            if left:
                self._files.zero(left)
        return bool(left)

    def pin(self, keys: Sequence[BlockKey], until: float | None, most: int) -> list[bool]:
        """Pins or unpins `keys`; all pinned blocks take `most` bytes at most; see `Backend.pin`."""
        with self._transaction():
            self._slots.end_pins(microseconds())
            if until is None:
                changed = self._slots.unpin(keys)
            else:
                end = FOREVER if until * 1e6 >= FOREVER else int(until * 1e6)
                stored = self._present(keys)
                changed = self._slots.pin([key for key in keys if key in stored], end, most)
        return [key in changed for key in keys]

    def check(self) -> None:
        """Checks for damage as at opening, after an error that damage may have caused.

        Reads all rows, and blocks other writes for that time; so it does nothing if it was called
        in the last minute.
        """
        with self._lock:
            if time.monotonic() < self._check_at:
                return
            with index_errors():
                expect_schema(self._db)
                expect_sound(self._db)
            self._check_at = time.monotonic() + _CHECK_S

    def touch(self, used: Mapping[int, int], hits: Mapping[int, int]) -> None:
        """Records when the copies with these ids were used, and how often loaded.

        Does nothing while the log cannot be moved.
        """
        if self._log.stuck:
            return
        with self._transaction():
            self.use_clock.follow(self._db)
            self._db.executemany(
                "UPDATE blocks SET used=max(used, ?), hits=hits+? WHERE id=?",
                [(stamp, hits.get(block, 0), block) for block, stamp in used.items()],
            )

    def tidy(self) -> None:
        """Removes data files without blocks, and old content of the index's log.

        Files with reserved slots stay.
        """
        with self._transaction():
            for segment, size in self._slots.empty_segments():
                self._slots.drop_segment(segment, size)
        with self._lock:
            self._log.cut()

    def drop_lost(self, segment: int) -> None:
        """Drops the blocks of `segment` if its file is missing or cut short."""
        with self._transaction():
            for found, size, slots in self._segments():
                if found == segment and not self._files.intact(found, size, slots):
                    self._slots.drop_segment(found, size)

    def close(self) -> None:
        """Closes the connection and ends the ownership. A second call does nothing."""
        with self._lock:
            self._owner.close()
            self._db.close()

    def _segments(self) -> Sequence[tuple[int, int, int]]:
        rows: list[tuple[int, int, int]] = self._db.execute(
            "SELECT id, size, slots FROM segments"
        ).fetchall()
        return whole_numbers(rows)

    def _present(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        query, values = "SELECT b.key" + READABLE, valid(self._settings.ttl)
        return {
            key
            for part in in_parts(keys)
            for (key,) in self._db.execute(query + marks(part), (*values, *part)).fetchall()
        }

    def _take(self, blocks: Sequence[StoredBlock], present: Collection[BlockKey]) -> Reservation:
        new: dict[BlockKey, tuple[int, StoredBlock]] = {}
        by_size: dict[int, list[BlockKey]] = {}
        saving: Counter[bytes] = Counter()
        for at, block in enumerate(blocks):
            if block.key not in present and block.key not in new:
                new[block.key] = (at, block)
                size = slot_size(block.data.numel(), self._settings.frame_sizes)
                by_size.setdefault(size, []).append(block.key)
                saving[tenant_of(block.namespace)] += size
        # Rows that have expired, or are unusable, would prevent the new ones.
        self._slots.free(self._deleted(list(new)))
        keep = {block.key for block in blocks} | {block.parent for block in blocks}
        self._saves += 1
        located: list[tuple[int, StoredBlock, Location]] = []
        count = len(blocks)
        for size, keys in by_size.items():
            locations = self._slots.take(size, len(keys), keep, saving)
            located += [
                (*new[key], location) for key, location in zip(keys, locations, strict=False)
            ]
            if len(locations) < len(keys):
                count = min(count, new[keys[len(locations)]][0])
        self._slots.free(location.key for at, _, location in located if at >= count)
        kept = sorted((entry for entry in located if entry[0] < count), key=lambda entry: entry[0])
        self._slots.reserve(self._owner.name, self._saves, [location for _, _, location in kept])
        self._slots.eviction.begin_saving(
            (*location.key, tenant_of(block.namespace)) for _, block, location in kept
        )
        return Reservation(self._saves, count, kept)

    def _rowless(self, slots: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        query = "SELECT 1 FROM blocks WHERE segment=? AND slot=?"
        return [slot for slot in slots if self._db.execute(query, slot).fetchone() is None]

    def _drop_expired(self, limit: int) -> None:
        # Lookups skip expired blocks; this frees their slots.
        self._slots.drop_ended(microseconds(), limit)
        if self._settings.ttl is not None:
            self._slots.drop_expired(oldest_valid(self._settings.ttl), limit)

    def _deleted(self, keys: Sequence[BlockKey]) -> list[tuple[int, int]]:
        """Deletes the rows of `keys`; returns the slots, which are neither free nor reserved."""
        slots: list[tuple[int, int]] = []
        for part in in_parts(keys):
            query = "DELETE FROM blocks WHERE key IN " + marks(part)  # noqa: S608 - question marks
            slots += self._db.execute(query + " RETURNING segment, slot", part).fetchall()
        return slots

    def _alone(self, slots: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        if slots and not self._rowless(slots[:1]):
            raise IndexDamaged("two blocks are in one slot")
        return slots

    def _expect_our_index(self) -> None:
        # Data files are found by name, so they would be those of the new index.
        there = identity(self._directory), log_identity(self._directory)
        if there != (self.identity, self.log_identity):
            raise IndexConnectionLost(f"disk store {self._directory}: the index was replaced")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock, index_errors():
            self._db.execute("BEGIN IMMEDIATE")
            self._slots.begin()
            try:
                self._expect_our_index()
                over = tuple(self._over)
                for save in over:
                    ended = self._slots.end_reservation(self._owner.name, save)
                    self._slots.free(ended)
                yield
                self._db.execute("COMMIT")
                self._over.difference_update(over)
            except BaseException:
                alone = self._db.in_transaction  # a COMMIT that failed has ended it
                try:
                    self._slots.undo(alone=alone)
                finally:
                    if alone:
                        self._db.execute("ROLLBACK")
                raise
            self._log.bound()
