"""One opening of a disk store's directory: its index, its data files, and moving blocks."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from itertools import takewhile
from pathlib import Path

from torch import Tensor

from kvconnect.backend import Child, StoredBlock, StoredEntry
from kvconnect.backends.disk.errors import NO_SPACE, IndexDamaged, IndexFull, SegmentLost
from kvconnect.backends.disk.find import IndexReader, Located, microseconds
from kvconnect.backends.disk.format import (
    check_format,
    connect,
    connect_read_only,
    log_nbytes,
    write_format,
)
from kvconnect.backends.disk.identity import Identity, held, identity, log_identity, warn_damaged
from kvconnect.backends.disk.lifetime import Lifetime
from kvconnect.backends.disk.probe import default_capacity, remove_probes, unwritable
from kvconnect.backends.disk.segments import SegmentFiles
from kvconnect.backends.disk.settings import DiskSettings
from kvconnect.backends.disk.writer import IndexWriter, Reservation
from kvconnect.errors import BackendUnavailable, ConfigurationError
from kvconnect.frame import FrameChecksum
from kvconnect.keys import BlockKey
from kvconnect.trace import count, warn_once

__all__ = ["DiskDirectory", "ignore"]

logger = logging.getLogger("kvconnect")


def ignore(point: str) -> None:
    """Go on at every named point; tests give something else."""


class DiskDirectory:
    """A store directory, open. Thread-safe; every method blocks on the disk.

    It stays an opening of the very index it found: when the directory vanishes or its index is
    replaced, `current` says so, and a new `DiskDirectory` is needed.

    Attributes:
        read_only: nothing can be written here now; loads work if there is an index.
        identity: of the index that is open; ``None``: there is none.
        capacity: bytes that may be stored here.

    Raises:
        BackendUnavailable: it cannot be opened; nothing stays open.
        ConfigurationError: it is not a directory, or of another format.
        IndexDamaged: see `DiskBackend`, which starts anew then.
    """

    def __init__(self, settings: DiskSettings, *, at: Callable[[str], None] = ignore) -> None:
        self.path = settings.path
        self._durable = settings.durability == "power"
        self._at = at
        self._used: dict[int, int] = {}
        self._used_lock = threading.Lock()
        self._hidden: set[BlockKey] = set()
        self._writer: IndexWriter | None = None
        self._reader: IndexReader | None = None
        self.identity: Identity | None = None
        self._log_identity: tuple[Identity | None, Identity | None] = None, None
        self.capacity = 0
        self._lifetime = Lifetime(self._close)
        self._outdated = False
        self._maintained = settings.access == "maintain"
        self._looking = settings.access == "read"
        if settings.access != "store" and identity(self.path) is None:
            raise _none(self.path)
        self.read_only = settings.access == "read"
        reason = None if self.read_only else unwritable(self.path)
        self.read_only |= reason is not None
        self._files = SegmentFiles(self.path, writable=not self.read_only)
        try:
            with held(self.path):
                self._open(settings, reason)
        except OSError as error:
            self._close()
            if isinstance(error, BackendUnavailable):
                raise
            raise BackendUnavailable(f"disk store {self.path}: {error}") from error
        except BaseException:
            self._close()
            raise

    def _open(self, settings: DiskSettings, reason: OSError | None) -> None:
        check_format(self.path)
        if settings.access == "read":
            self._open_read_only(settings.ttl, must=True)
            return
        if reason is None:
            reason = self._open_writable(settings)
        if reason is not None:
            self.read_only = True
            warn_once(
                f"disk.read_only.{self.path}.{reason.errno}",
                f"disk store {self.path}: cannot be written to ({reason.strerror}); "
                f"nothing is saved",
            )
            self._open_read_only(settings.ttl)

    def _open_writable(self, settings: DiskSettings) -> OSError | None:
        """Open for saves, too; why not, if the disk has not even room for the index."""
        try:
            self._make_writer(settings)
        except IndexFull:
            full = OSError(errno.ENOSPC, "no space left on device")
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            full = error
        else:
            return None
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        return full

    def _make_writer(self, settings: DiskSettings) -> None:
        write_format(self.path)
        given = None if self._maintained else settings.capacity
        self.capacity = given or default_capacity(self.path, self._files.nbytes())
        self._writer = IndexWriter(
            self.path,
            self._files,
            capacity=self.capacity,
            durability=settings.durability,
            ttl=settings.ttl,
            frame_sizes=settings.frame_sizes,
            at=self._at,
        )
        self._writer.clean(shrink=given is not None)
        remove_probes(self.path)
        self._reader = IndexReader(
            connect(self.path, settings.durability, log_nbytes(self.capacity)), settings.ttl
        )
        self.identity, self._log_identity = self._writer.identity, self._writer.log_identity

    def _open_read_only(self, ttl: float | None, *, must: bool = False) -> None:
        self.identity = identity(self.path)
        if self.identity is None:
            return
        try:
            db = connect_read_only(self.path)
            if db is not None:
                self._reader = IndexReader(db, ttl)
                return
        except (IndexDamaged, BackendUnavailable) as error:
            if must:
                raise
            warn_damaged(self.path, error)
            return
        finally:
            self._log_identity = log_identity(self.path)
        if must:
            raise _none(self.path)
        self.identity = None  # to look again at the next call

    @property
    def current(self) -> bool:
        """Whether what is open here is still what the path leads to."""
        there = identity(self.path), log_identity(self.path)
        return not self._outdated and there == (self.identity, self._log_identity)

    def lookup(self, keys: Sequence[BlockKey]) -> int:
        """How many leading `keys` are stored."""
        found = self._find(keys)
        self._note_use(found)
        return len(found)

    def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        """Fill `into`; return how many leading ones are filled."""
        found = self._find(keys)
        for at, (block, buffer) in enumerate(zip(found, into, strict=False)):
            if block.length > buffer.numel():
                del found[at:]
                break
        rooms = [buffer[: block.length] for block, buffer in zip(found, into, strict=False)]
        try:
            self._files.read([block.place for block in found], rooms)
        except SegmentLost as lost:
            if self._writer is not None:
                self._writer.drop_lost(lost.segment)
            intact = next(
                at for at, block in enumerate(found) if block.place.segment == lost.segment
            )
            return self.load(keys[:intact], into[:intact])
        # A slot may have been given to another block while it was read. Its row goes first: if the
        # row is still there, the slot was not touched before now.
        del found[0 if (reader := self._reader) is None else reader.alive(found) :]
        self._note_use(found)
        return len(found)

    def save(self, blocks: Sequence[StoredBlock], checksums: Sequence[FrameChecksum] = ()) -> int:
        """Store `blocks`, sealed by `checksums` if any; return how many leading ones are."""
        if self._writer is None:
            return len(self._find([block.key for block in blocks]))
        try:
            self.flush()
            reservation = self._writer.reserve(blocks)
            if not reservation.new:
                return reservation.count
            return self._write(self._writer, reservation, checksums)
        except SegmentLost as lost:
            self._writer.drop_lost(lost.segment)
        except IndexFull as error:
            self._warn_full(error)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            self._warn_full(error)
        return 0

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Forget `keys`; where nothing can be written, only for as long as this is open."""
        if self._writer is None:
            self._hidden.update(keys)
        else:
            self._writer.delete(keys)

    def flush(self) -> None:
        """Write down what was used since the last time."""
        with self._used_lock:
            used, self._used = self._used, {}
        # What is looked at for maintenance is not used by that.
        if used and self._writer is not None and not self._maintained:
            self._writer.touch(used)

    def children(self, key: BlockKey | None) -> list[Child]:
        """The stored blocks with tokens whose parent is `key`."""
        found = [] if (reader := self._reader) is None else reader.children(key)
        return [child for child in found if child.key not in self._hidden]

    def page(self, after: int) -> tuple[int, list[StoredEntry]]:
        """Some blocks, from `after` on, and where to go on; none at the end."""
        return (after, []) if (reader := self._reader) is None else reader.page(after)

    def describe(self, keys: Sequence[BlockKey]) -> list[StoredEntry | None]:
        """What `page` would list of each of `keys`."""
        return [None] * len(keys) if (reader := self._reader) is None else reader.describe(keys)

    def stats(self) -> dict[str, float]:
        """Numbers about the store."""
        totals = {} if (reader := self._reader) is None else reader.totals()
        if self._looking:
            return dict(totals)
        return {**totals, "capacity": self.capacity, "read_only": self.read_only}

    def in_use(self) -> AbstractContextManager[None]:
        """Keep this open meanwhile, also if `retire` is called."""
        return self._lifetime.in_use()

    def retire(self) -> None:
        """Close everything, as soon as nobody uses it. The second time does nothing."""
        self._lifetime.end()

    def forget(self) -> None:
        """Not be `current` any more: the directory may be writable by now."""
        self._outdated = True

    def close(self) -> None:
        """Write down what was used, then `retire`."""
        try:
            self.flush()
            if self._maintained and self._writer is not None:
                self._writer.drop_empty()
        except (OSError, IndexDamaged) as error:
            logger.debug("disk store %s: not tidied up at close: %s", self.path, error)
        finally:
            self.retire()

    def give_up_index(self) -> None:
        """Answer as if nothing were stored: the index is damaged and cannot be replaced."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _close(self) -> None:
        with ExitStack() as stack:
            with suppress(OSError):  # a directory that is gone, perhaps
                stack.enter_context(held(self.path))
            if self._reader is not None:
                self._reader.close()
            if self._writer is not None:
                self._writer.close()
        self._files.close()

    def _find(self, keys: Sequence[BlockKey]) -> list[Located]:
        reader = self._reader  # may be given up meanwhile
        if reader is None:
            return []
        if self._hidden:
            keys = list(takewhile(lambda key: key not in self._hidden, keys))
        return reader.find(keys)

    def _note_use(self, found: Sequence[Located]) -> None:
        # The end of a chain counts as used a little earlier than its beginning, so it goes first.
        now = microseconds()
        with self._used_lock:
            self._used.update((block.id, now - at) for at, block in enumerate(found))

    def _write(
        self, writer: IndexWriter, reservation: Reservation, checksums: Sequence[FrameChecksum]
    ) -> int:
        try:
            buffers = [block.data for _, block, _ in reservation.new]
            seals = [checksums[at] for at, _, _ in reservation.new] if checksums else ()
            self._files.write(reservation.places, buffers, seals)
            if self._durable:
                self._files.sync(reservation.places)
            self._at("written")
            return writer.commit(reservation)
        except BaseException:
            # Where this fails, too, the slots stay reserved until this process ends.
            with suppress(OSError, IndexDamaged):
                writer.release(reservation)
            raise

    def _warn_full(self, error: OSError) -> None:
        count("store.disk.full")
        warn_once(
            f"disk.full.{self.path}",
            f"disk store {self.path}: {error}; blocks are not saved until there is space",
        )


def _none(path: Path) -> ConfigurationError:
    return ConfigurationError(f"disk store: there is none in '{path}'; give another")
