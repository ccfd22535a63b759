"""The data files of the disk store: segments, each a preallocated file of equal slots."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from torch import Tensor

from kvconnect.backends.disk.direct_io import (
    is_aligned,
    open_direct,
    read_at,
    scratch,
    view,
    write_at,
)
from kvconnect.backends.disk.errors import SegmentLost
from kvconnect.backends.disk.lifetime import Lifetime
from kvconnect.backends.disk.part_queue import PartQueue
from kvconnect.backends.disk.runs import Location, Run, parts
from kvconnect.backends.lanes import Lanes
from kvconnect.frame import FrameChecksum

__all__ = ["SegmentFiles"]

_NAME = re.compile(r"segment-(\d+)-(\d+)\.slots")


class _File(Lifetime):
    """An open segment."""

    def __init__(self, fd: int) -> None:
        super().__init__(lambda: os.close(fd))
        self.fd = fd


class SegmentFiles:
    """The segment files in `directory`. Thread-safe; every method blocks on the disk.

    Which slots hold what is the index's business.

    Args:
        lanes: on a thread of ``loads`` is read, and on one of ``saves`` written.
    """

    def __init__(self, directory: Path, lanes: Lanes, *, writable: bool) -> None:
        self._directory = directory
        self._writable = writable
        self._files: dict[int, _File] = {}
        self._lock = threading.Lock()
        self._reads, self._writes = PartQueue(lanes["loads"]), PartQueue(lanes["saves"])

    def create(self, segment: int, size: int, slots: int) -> None:
        """Make the file of `segment` with all its bytes allocated.

        Raises:
            OSError: there is no such file afterwards.
        """
        path = self._path(segment, size)
        path.unlink(missing_ok=True)  # left behind by a process that died before its commit
        fd = open_direct(path, os.O_RDWR | os.O_CREAT)
        try:
            _allocate(fd, size * slots)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        with self._lock:
            self._files[segment] = _File(fd)

    def remove(self, segment: int, size: int) -> None:
        """Delete the file of `segment`; its bytes are free at once, also if others have it open."""
        path = self._path(segment, size)
        # It has no name before it has no bytes: a process that writes must see that it is gone.
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                path.unlink(missing_ok=True)
                os.ftruncate(fd, 0)
            finally:
                os.close(fd)
        self._retire([segment])

    def empty(self, segment: int) -> None:
        """Free the bytes of the file that `create` has made; its name, if it has one, stays."""
        with self._lock:
            file = self._files.get(segment)
            if file is not None:
                os.ftruncate(file.fd, 0)
        self._retire([segment])

    def intact(self, segment: int, size: int, slots: int) -> bool:
        """Whether the file of `segment` is there and long enough."""
        try:
            return self._path(segment, size).stat().st_size >= size * slots
        except FileNotFoundError:
            return False

    def keep_only(self, segments: Collection[int]) -> None:
        """Close the files of all others: another process removed them."""
        with self._lock:
            gone = [segment for segment in self._files if segment not in segments]
        self._retire(gone)

    def remove_strays(self, segments: Collection[int]) -> int:
        """Delete segment files that are not among `segments`; return how many."""
        strays = [
            path
            for path in self._directory.iterdir()
            if (match := _NAME.fullmatch(path.name)) and int(match[1]) not in segments
        ]
        for path in strays:
            path.unlink(missing_ok=True)
        return len(strays)

    def nbytes(self) -> int:
        """Bytes of all segment files."""
        total = 0
        for path in self._directory.iterdir():
            if _NAME.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):  # another process drops it just now
                    total += path.stat().st_size
        return total

    def read(self, locations: Sequence[Location], buffers: Sequence[Tensor]) -> None:
        """Fill each of `buffers` from the slot of the same index; none is longer than its slot.

        Raises:
            SegmentLost: a file is gone or too short; `buffers` are undefined.
            OSError: the same.
        """
        self._reads.run([partial(self._read, part) for part in parts(locations, buffers)])

    def write(
        self,
        locations: Sequence[Location],
        buffers: Sequence[Tensor],
        checksums: Sequence[FrameChecksum] = (),
    ) -> None:
        """Write each of `buffers` to the slot of the same index, sealed by its checksum if any.

        Raises:
            SegmentLost: a file is gone.
            OSError: any of the slots may have been written in part.
        """
        self._writes.run(
            [partial(self._write, part) for part in parts(locations, buffers, checksums)]
        )

    def sync(self, locations: Collection[Location]) -> None:
        """Return once what was written to `locations` survives a power failure."""
        for location in {location.segment: location for location in locations}.values():
            with self._using(location) as fd:
                os.fsync(fd)

    def close(self) -> None:
        """Close all files, those in use as soon as they are not."""
        self.keep_only(())

    def _read(self, part: Sequence[Run]) -> None:
        for run in part:
            need = sum(buffer.numel() for buffer in run.buffers)
            with self._using(run.location) as fd:
                if is_aligned(run.buffers[0]):
                    got = read_at(fd, [view(buffer) for buffer in run.buffers], run.offset)
                else:
                    (buffer,) = run.buffers
                    bounce = scratch(need)
                    got = read_at(fd, [bounce], run.offset)
                    view(buffer)[:] = bounce[:need]
            if got < need:
                raise SegmentLost(run.location.segment)

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
            # Deleted by a process that died before its index knew: what is in it is lost to others.
            if not os.fstat(file.fd).st_nlink:
                raise SegmentLost(location.segment)
            yield file.fd

    def _open(self, location: Location) -> _File:
        flags = os.O_RDWR if self._writable else os.O_RDONLY
        try:
            return _File(open_direct(self._path(location.segment, location.size), flags))
        except FileNotFoundError as error:
            raise SegmentLost(location.segment) from error

    def _retire(self, segments: Sequence[int]) -> None:
        with self._lock:
            for segment in segments:
                file = self._files.pop(segment, None)
                if file is not None:
                    file.end()


def _allocate(fd: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}:
            raise
        os.ftruncate(fd, nbytes)
