"""The data files of the disk store: segments, each a preallocated file of equal slots."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from kvconnect.backends.disk.errors import SegmentLost
from kvconnect.backends.disk.files.direct_io import (
    Location,
    Run,
    is_aligned,
    moved,
    open_direct,
    parts,
    scratch,
    view,
    write_at,
)
from kvconnect.backends.disk.files.own_file import ForeignFile, is_own, open_own
from kvconnect.backends.disk.files.owner import Lifetime
from kvconnect.backends.lanes import Lane, Lanes, fulfil
from kvconnect.errors import BackendUnavailable
from kvconnect.frame import FrameChecksum

if TYPE_CHECKING:
    from torch import Tensor

_NAME = re.compile(r"segment-(\d+)-(\d+)\.slots")
# The parts that are moved at a time: enough to keep the disk busy. With more parts, all calls would
# end together, and the disk would be idle during their commits and checksums.
_AT_ONCE = 3
_ZEROS_NBYTES = 1 << 20


class _File(Lifetime):
    """An open segment."""

    def __init__(self, fd: int) -> None:
        super().__init__(lambda: os.close(fd))
        self.fd = fd


class SegmentFiles:
    """The segment files in `directory`. Thread-safe; every method blocks on the disk.

    The index records which slot holds which block.

    Args:
        lanes: reads run on a thread of ``loads``, writes on one of ``saves``.
    """

    def __init__(self, directory: Path, lanes: Lanes, *, writable: bool) -> None:
        self._directory = directory
        self._writable = writable
        self._files: dict[int, _File] = {}
        self._lock = threading.Lock()
        self._reads, self._writes = PartQueue(lanes["loads"]), PartQueue(lanes["saves"])

    def create(self, segment: int, size: int, slots: int) -> None:
        """Makes the file of `segment` with all its bytes allocated.

        Raises:
            OSError: there is no such file afterwards.
        """
        path = self._path(segment, size)
        path.unlink(missing_ok=True)  # left behind by a process that died before its commit
        fd = open_direct(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            _allocate(fd, size * slots)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        with self._lock:
            self._files[segment] = _File(fd)

    def remove(self, segment: int, size: int) -> None:
        """Deletes the file of `segment`; frees its bytes at once, even if others have it open."""
        path = self._path(segment, size)
        # The name is removed before the bytes, so that a process that writes notices the removal.
        try:
            fd = open_own(path, os.O_RDWR)
        except FileNotFoundError:
            pass
        except ForeignFile:
            _unlink(path)
        else:
            try:
                path.unlink(missing_ok=True)
                os.ftruncate(fd, 0)
            finally:
                os.close(fd)
        self._retire([segment])

    def empty(self, segment: int) -> None:
        """Frees the bytes of a file that `create` has made; its name, if still there, stays."""
        with self._lock:
            file = self._files.get(segment)
            if file is not None:
                os.ftruncate(file.fd, 0)
        self._retire([segment])

    def intact(self, segment: int, size: int, slots: int) -> bool:
        """Returns whether the file of `segment` is there, the store's, and long enough."""
        path = self._path(segment, size)
        try:
            found = path.lstat()
        except FileNotFoundError:
            return False
        return is_own(found, path) and found.st_size >= size * slots

    def keep_only(self, segments: Collection[int]) -> None:
        """Closes the files of all other segments: another process removed them."""
        with self._lock:
            gone = [segment for segment in self._files if segment not in segments]
        self._retire(gone)

    def remove_strays(self, segments: Collection[int]) -> None:
        """Deletes segment files that are not among `segments`."""
        for segment, path in self._present():
            if segment not in segments:
                _unlink(path)

    def nbytes(self) -> int:
        """Returns the bytes of all segment files."""
        total = 0
        for _, path in self._present():
            with suppress(FileNotFoundError):  # another process is removing it
                total += path.lstat().st_size
        return total

    def read(
        self,
        locations: Sequence[Location],
        buffers: Sequence[Tensor],
        checksums: Sequence[FrameChecksum] = (),
    ) -> None:
        """Fills each of `buffers` from the slot of the same index; none is longer than its slot.

        Each checksum, if any, hashes the bytes of its buffer.

        Raises:
            SegmentLost: a file is gone or too short; `buffers` are undefined.
            OSError: reading failed; `buffers` are undefined.
        """
        self._reads.run(
            [partial(self._read, part) for part in parts(locations, buffers, checksums)]
        )

    def write(
        self,
        locations: Sequence[Location],
        buffers: Sequence[Tensor],
        checksums: Sequence[FrameChecksum] = (),
    ) -> None:
        """Writes each of `buffers` to the slot of the same index, sealed by its checksum if any.

        Raises:
            SegmentLost: a file is gone.
            OSError: any of the slots may have been written in part.
        """
        self._writes.run(
            [partial(self._write, part) for part in parts(locations, buffers, checksums)]
        )

    def zero(self, ends: Sequence[tuple[Location, int]]) -> None:
        """Overwrites slots with zeros, each from an aligned offset to its end; skips lost files.

        The zeros are on the medium when this returns.

        Raises:
            OSError: any of the slots may have been overwritten in part.
        """
        size = max(location.size for location, _ in ends)
        zeros = scratch(min(size, _ZEROS_NBYTES))
        written = []
        for location, begin in ends:
            with suppress(SegmentLost), self._using(location) as fd:
                for start in range(begin, location.size, len(zeros)):
                    piece = zeros[: min(len(zeros), location.size - start)]
                    write_at(fd, [piece], location.offset + start)
                written.append(location)
        with suppress(SegmentLost):
            self.sync(written)

    def sync(self, locations: Collection[Location]) -> None:
        """Blocks until what was written to `locations` survives a power failure."""
        for location in {location.segment: location for location in locations}.values():
            with self._using(location) as fd:
                os.fsync(fd)

    def close(self) -> None:
        """Closes all files, those in use as soon as they are not."""
        self.keep_only(())

    def _read(self, part: Sequence[Run]) -> None:
        for run in part:
            need = sum(buffer.numel() for buffer in run.buffers)
            with self._using(run.location) as fd:
                if is_aligned(run.buffers[0]):
                    views = [view(buffer) for buffer in run.buffers]
                    got = moved(os.preadv, fd, views, run.offset)
                else:
                    (buffer,) = run.buffers
                    bounce = scratch(need)
                    got = moved(os.preadv, fd, [bounce], run.offset)
                    view(buffer)[:] = bounce[:need]
            if got < need:
                raise SegmentLost(run.location.segment)
            for checksum, buffer in zip(run.checksums, run.buffers, strict=False):
                checksum.passed(0, buffer.numel())

    def _write(self, part: Sequence[Run]) -> None:
        for run in part:
            for checksum in run.checksums:
                checksum.seal()
            if is_aligned(run.buffers[0]):
                views = [view(buffer) for buffer in run.buffers]
            else:
                (buffer,) = run.buffers
                bounce = scratch(buffer.numel())
                bounce[: buffer.numel()] = view(buffer)
                views = [bounce]
            with self._using(run.location) as fd:
                write_at(fd, views, run.offset)

    def _present(self) -> list[tuple[int, Path]]:
        found = ((_NAME.fullmatch(path.name), path) for path in self._directory.iterdir())
        return [(int(match[1]), path) for match, path in found if match]

    def _path(self, segment: int, size: int) -> Path:
        return self._directory / f"segment-{segment:06d}-{size}.slots"

    @contextmanager
    def _using(self, location: Location) -> Iterator[int]:
        with ExitStack() as using:
            with self._lock:
                file = self._files.get(location.segment)
                if file is None:
                    file = self._files[location.segment] = self._open(location)
                using.enter_context(file.in_use())
            # Deleted by a process that died before the commit: other processes cannot open the
            # file.
            if not os.fstat(file.fd).st_nlink:
                raise SegmentLost(location.segment)
            yield file.fd

    def _open(self, location: Location) -> _File:
        flags = os.O_RDWR if self._writable else os.O_RDONLY
        try:
            return _File(open_direct(self._path(location.segment, location.size), flags))
        except (FileNotFoundError, ForeignFile) as error:
            raise SegmentLost(location.segment) from error

    def _retire(self, segments: Sequence[int]) -> None:
        with self._lock:
            for segment in segments:
                file = self._files.pop(segment, None)
                if file is not None:
                    file.end()


class PartQueue:
    """A queue of parts of calls, in the order of the calls; the calls themselves run on `lane`.

    The thread of a call runs parts until the last part of the call has begun, and free threads of
    the lane help. So no thread waits for work that no thread runs. The first call ends first, so
    that its commit overlaps with the next call's I/O.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._parts: SimpleQueue[tuple[Future[None], Callable[[], None]]] = SimpleQueue()
        self._moving = threading.Semaphore(_AT_ONCE)
        self._helpers = threading.Semaphore(_AT_ONCE - 1)

    def run(self, parts: Sequence[Callable[[], None]]) -> None:
        """Runs `parts`; blocks until all have ended, even if one fails: they use the same buffers.

        Raises the error of the first part that failed.
        """
        if len(parts) == 1:  # not waiting for the parts of other calls
            parts[0]()
            return
        futures: list[Future[None]] = [Future() for _ in parts]
        for item in zip(futures, parts, strict=True):
            self._parts.put(item)
        with suppress(BackendUnavailable):  # the lane is closing: this thread runs all parts
            for _ in range(min(_AT_ONCE, len(parts)) - 1):
                self._lane.submit(self._help)
        while futures and not (futures[-1].running() or futures[-1].done()):
            self._run_one()
        wait(futures)
        for future in futures:
            future.result()

    def _help(self) -> None:
        if self._helpers.acquire(blocking=False):
            try:
                while self._run_one():
                    pass
            finally:
                self._helpers.release()

    def _run_one(self) -> bool:
        try:
            with self._moving:
                fulfil(*self._parts.get_nowait())
        except Empty:
            return False
        return True


def _unlink(path: Path) -> None:
    with suppress(IsADirectoryError):  # which is not the store's
        path.unlink(missing_ok=True)


def _allocate(fd: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}:
            raise
        os.ftruncate(fd, nbytes)
