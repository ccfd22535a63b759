"""The open directory of a disk store: its index and its data files."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import takewhile
from pathlib import Path

from kvconnect.backend import Child, StoredEntry
from kvconnect.backends.disk.errors import NO_SPACE, IndexDamaged, IndexFailed
from kvconnect.backends.disk.files.own_file import warn_shared
from kvconnect.backends.disk.files.owner import Lifetime
from kvconnect.backends.disk.files.segments import SegmentFiles
from kvconnect.backends.disk.find import IndexReader, Located, microseconds
from kvconnect.backends.disk.format import connect, connect_read_only, empty_index, log_nbytes
from kvconnect.backends.disk.path import (
    Identity,
    check_format,
    default_capacity,
    expect_own_index,
    held,
    identity,
    log_identity,
    no_space,
    remove_probes,
    unwritable,
    warn_damaged,
    write_format,
)
from kvconnect.backends.disk.settings import DiskSettings
from kvconnect.backends.disk.writer import IndexWriter
from kvconnect.backends.lanes import Lanes
from kvconnect.errors import BackendUnavailable, ConfigurationError
from kvconnect.keys import BlockKey
from kvconnect.trace import warn_once

logger = logging.getLogger("kvconnect")


def ignore(point: str) -> None:
    """Does nothing at a named point of a save; tests pass a function that does something."""


class DiskDirectory(Lifetime):
    """A store directory, open. Thread-safe; every method blocks on the disk.

    It stays bound to the index that it opened. When the directory vanishes or its index is
    replaced, `current` becomes false, and a new `DiskDirectory` is needed.

    Args:
        settings: the store's settings.
        lanes: ``loads`` and ``saves``, on whose threads it is used.
        at: called with the name of the point of a save that is reached.

    Attributes:
        files: the data files.
        reader: the reader of the index; of an empty index if there is none.
        writer: ``None`` if the directory cannot be written to now; loads work if there is an index.
        identity: the identity of the open index; ``None`` if there is none.
        capacity: the bytes that may be stored here.

    Raises:
        BackendUnavailable, OSError: the directory cannot be opened; nothing stays open.
        ConfigurationError: the path is not a directory, or its format is another version's.
        IndexDamaged: the index is damaged; `DiskClient` replaces it then.
    """

    def __init__(
        self, settings: DiskSettings, lanes: Lanes, *, at: Callable[[str], None] = ignore
    ) -> None:
        super().__init__(self._close_all)
        self.settings = settings
        self.at = at
        self.path = settings.path
        self.reader = IndexReader(empty_index(), None)
        self.writer: IndexWriter | None = None
        self.identity: Identity | None = None
        self.capacity = 0
        self._log_identity: tuple[Identity | None, Identity | None] = None, None
        self._used: dict[int, int] = {}
        self._hits: Counter[int] = Counter()
        self._used_lock = threading.Lock()
        self._hidden: set[BlockKey] = set()
        self._outdated = False
        if settings.access != "store" and identity(self.path) is None:
            raise _none(self.path)
        reason = None if settings.access == "read" else unwritable(self.path)
        writable = settings.access != "read" and reason is None
        self.files = SegmentFiles(self.path, lanes, writable=writable)
        try:
            with held(self.path):
                warn_shared(self.path)
                check_format(self.path)
                expect_own_index(self.path)
                if writable:
                    reason = self._open_writable()
                if self.writer is None:
                    self._open_read_only(reason)
        except BaseException:
            self._close_all()
            raise

    def _open_writable(self) -> OSError | None:
        """Opens the index for saves; returns the error if the disk lacks space for the index."""
        try:
            self._make_writer()
        except OSError as error:
            full = error if error.errno in NO_SPACE else None
            if isinstance(error, IndexFailed):
                full = no_space(self.path)
            if full is None:
                raise
            if self.writer is not None:
                self.writer.close()
                self.writer = None
            return full
        return None

    def _make_writer(self) -> None:
        settings = self.settings
        write_format(self.path)
        given = None if settings.access == "maintain" else settings.capacity
        self.capacity = given or default_capacity(self.path, self.files.nbytes())
        self.writer = IndexWriter(settings, self.files, capacity=self.capacity, at=self.at)
        self.writer.clean(shrink=given is not None)
        with suppress(OSError):  # an engine opens it nevertheless, and the next drop tries again
            self.writer.erase()
        remove_probes(self.path)
        db = connect(self.path, settings.durability, log_nbytes(self.capacity))
        self._read(IndexReader(db, settings.ttl))
        self.identity, self._log_identity = self.writer.identity, self.writer.log_identity

    def _open_read_only(self, reason: OSError | None) -> None:
        """Opens an existing index for reading, since `reason` prevents writing.

        Without a `reason` the directory was opened only to read; then a missing index is an error.
        """
        if reason is not None:
            warn_once(
                f"disk.read_only.{self.path}.{reason.errno}",
                f"disk store {self.path}: cannot be written to ({reason.strerror}); "
                f"nothing is saved",
            )
        self.identity = identity(self.path)
        if self.identity is None:
            return
        try:
            db = connect_read_only(self.path)
            if db is not None:
                self._read(IndexReader(db, self.settings.ttl))
                return
        except (IndexDamaged, BackendUnavailable) as error:
            if reason is None:
                raise
            warn_damaged(self.path, error)
            return
        finally:
            self._log_identity = log_identity(self.path)
        if reason is None:
            raise _none(self.path)
        self.identity = None  # so that the next call opens the directory again

    def _read(self, reader: IndexReader) -> None:
        before, self.reader = self.reader, reader
        before.close()

    @property
    def read_only(self) -> bool:
        """Returns whether the directory cannot be written to now."""
        return self.writer is None

    @property
    def current(self) -> bool:
        """Returns whether the path still leads to the index that is open here."""
        there = identity(self.path), log_identity(self.path)
        return not self._outdated and there == (self.identity, self._log_identity)

    def find(self, keys: Sequence[BlockKey]) -> list[Located]:
        """Returns the leading ones of `keys` that are stored."""
        if self._hidden:
            keys = list(takewhile(lambda key: key not in self._hidden, keys))
        return self.reader.find(keys)

    def lookup(self, keys: Sequence[BlockKey]) -> int:
        """Returns how many leading `keys` are stored; they count as used now."""
        found = self.find(keys)
        self.note_use(found)
        return len(found)

    def note_use(self, found: Sequence[Located], *, loaded: bool = False) -> None:
        """Marks `found`, a chain from its beginning, as used now, and as `loaded` once more."""
        # The end of a chain counts as used a little earlier than its beginning, so it is dropped
        # first.
        now = microseconds() if self.writer is None else self.writer.use_clock.now()
        with self._used_lock:
            self._used.update((block.id, now - at) for at, block in enumerate(found))
            if loaded:
                self._hits.update(block.id for block in found)

    def flush(self) -> None:
        """Writes the times of use and the loads since the last call to the index."""
        with self._used_lock:
            used, self._used = self._used, {}
            hits, self._hits = self._hits, Counter()
        # Reading a block for maintenance is no use of it.
        if used and self.writer is not None and self.settings.access != "maintain":
            self.writer.touch(used, hits)

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Deletes `keys`; in a read-only directory hides them as long as the directory is open.

        In maintenance their bytes are overwritten, too.
        """
        if self.writer is None:
            self._hidden.update(keys)
        elif self.settings.access == "maintain":
            self.writer.erase(keys)
        else:
            self.writer.delete(keys)

    def scrub(self) -> bool:
        """Overwrites some bytes of dropped blocks; returns whether more may be left.

        Raises:
            BackendUnavailable: the directory cannot be written to.
        """
        return self._writable().scrub()

    def pin(self, keys: Sequence[BlockKey], until: float | None) -> list[bool]:
        """Pins or unpins `keys`; see `Backend.pin`.

        Raises:
            BackendUnavailable: the directory cannot be written to.
        """
        share = self.settings.pin_fraction * (self.settings.capacity or self.capacity)
        return self._writable().pin(keys, until, int(share))

    def _writable(self) -> IndexWriter:
        if self.writer is None:
            raise BackendUnavailable(f"disk store {self.path}: cannot be written to")
        return self.writer

    def children(self, key: BlockKey | None) -> list[Child]:
        """Returns the stored blocks with tokens whose parent is `key`."""
        return [child for child in self.reader.children(key) if child.key not in self._hidden]

    def page(self, after: int) -> tuple[int, list[StoredEntry]]:
        """Returns entries of blocks after the id `after`, and the `after` of the next page.

        At the end there are no entries, and `after` is unchanged.
        """
        return self.reader.page(after)

    def stats(self) -> dict[str, float]:
        """Returns numbers about the store."""
        totals = self.reader.totals()
        if self.settings.access == "read":
            return totals
        return {**totals, "capacity": self.capacity, "read_only": self.read_only}

    def forget(self) -> None:
        """Makes `current` false, so that the next call opens the directory again.

        The directory may be writable by then.
        """
        self._outdated = True

    def close(self) -> None:
        """Writes the times of use to the index, then calls `end`."""
        try:
            self.flush()
            if self.settings.access == "maintain" and self.writer is not None:
                self.writer.tidy()
        except (OSError, IndexDamaged) as error:
            logger.debug("disk store %s: not tidied up at close: %s", self.path, error)
        finally:
            self.end()

    def give_up_index(self) -> None:
        """Makes the store empty until it is reopened: its damaged index cannot be replaced."""
        self._read(IndexReader(empty_index(), None))

    def _close_all(self) -> None:
        with ExitStack() as stack:
            with suppress(OSError):  # for example, the directory was removed
                stack.enter_context(held(self.path))
            self.reader.close()
            if self.writer is not None:
                self.writer.close()
        self.files.close()


def _none(path: Path) -> ConfigurationError:
    return ConfigurationError(f"disk store: there is none in '{path}'; give another")
