"""The data files of the disk store: segments, each a preallocated file of equal slots."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from kvconnect.backends.direct_io import is_aligned, open_direct, read_at, scratch, view, write_at

__all__ = ["NO_SPACE", "Place", "SegmentFiles", "SegmentLost"]

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers that mean: no more bytes, whoever limits them."""

_NAME = re.compile(r"segment-(\d+)-(\d+)\.slots")
# Neighbouring slots go in one system call up to this; longer ones measure no faster.
_RUN_NBYTES = 16 << 20


class SegmentLost(Exception):
    """A segment's file is gone or cut short. Never leaves the disk store."""

    def __init__(self, segment: int) -> None:
        super().__init__(f"segment {segment} is gone or cut short")
        self.segment = segment


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A slot of `size` bytes."""

    segment: int
    slot: int
    size: int

    @property
    def key(self) -> tuple[int, int]:
        """Which slot it is, for the index."""
        return self.segment, self.slot

    @property
    def offset(self) -> int:
        """Where it starts in the segment's file."""
        return self.slot * self.size


class _File:
    """An open segment; closed when the last user is done with it."""

    __slots__ = ("fd", "retired", "users")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 0
        self.retired = False


class SegmentFiles:
    """The segment files in `directory`. Thread-safe; every method blocks on the disk.

    Which slots hold what is the index's business.
    """

    def __init__(self, directory: Path, *, writable: bool) -> None:
        self._directory = directory
        self._writable = writable
        self._files: dict[int, _File] = {}
        self._lock = threading.Lock()

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
        with contextlib.suppress(FileNotFoundError):
            os.truncate(path, 0)
            path.unlink()
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
        paths = (path for path in self._directory.iterdir() if _NAME.fullmatch(path.name))
        return sum(path.stat().st_size for path in paths)

    def read(self, places: Sequence[Place], buffers: Sequence[Tensor]) -> None:
        """Fill each of `buffers` from the slot of the same index; none is longer than its slot.

        Raises:
            SegmentLost: a file is gone or too short; `buffers` are undefined.
            OSError: the same.
        """
        for run in _runs(places, buffers):
            place = places[run.start]
            with self._using(place) as fd:
                if is_aligned(buffers[run.start]):
                    views = [view(buffer) for buffer in buffers[run]]
                    need, got = sum(map(len, views)), read_at(fd, views, place.offset)
                else:
                    need = buffers[run.start].numel()
                    bounce = scratch(need)
                    got = read_at(fd, [bounce], place.offset)
                    view(buffers[run.start])[:] = bounce[:need]
            if got < need:
                raise SegmentLost(place.segment)

    def write(self, places: Sequence[Place], buffers: Sequence[Tensor]) -> None:
        """Write each of `buffers` to the slot of the same index.

        Raises:
            SegmentLost: a file is gone.
            OSError: any of the slots may have been written in part.
        """
        for run in _runs(places, buffers):
            place = places[run.start]
            if is_aligned(buffers[run.start]):
                views = [view(buffer) for buffer in buffers[run]]
            else:
                bounce = scratch(buffers[run.start].numel())
                bounce[: buffers[run.start].numel()] = view(buffers[run.start])
                views = [bounce]
            with self._using(place) as fd:
                write_at(fd, views, place.offset)

    def sync(self, places: Collection[Place]) -> None:
        """Return once what was written to `places` survives a power failure."""
        for place in {place.segment: place for place in places}.values():
            with self._using(place) as fd:
                os.fsync(fd)

    def close(self) -> None:
        """Close all files, those in use as soon as they are not."""
        self.keep_only(())

    def _path(self, segment: int, size: int) -> Path:
        return self._directory / f"segment-{segment:06d}-{size}.slots"

    @contextmanager
    def _using(self, place: Place) -> Iterator[int]:
        with self._lock:
            file = self._files.get(place.segment)
            if file is None:
                file = self._files[place.segment] = self._open(place)
            file.users += 1
        try:
            yield file.fd
        finally:
            with self._lock:
                file.users -= 1
                if file.retired and not file.users:
                    os.close(file.fd)

    def _open(self, place: Place) -> _File:
        flags = os.O_RDWR if self._writable else os.O_RDONLY
        try:
            return _File(open_direct(self._path(place.segment, place.size), flags))
        except FileNotFoundError as error:
            raise SegmentLost(place.segment) from error

    def _retire(self, segments: Sequence[int]) -> None:
        with self._lock:
            for segment in segments:
                file = self._files.pop(segment, None)
                if file is not None:
                    file.retired = True
                    if not file.users:
                        os.close(file.fd)


def _allocate(fd: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}:
            raise
        os.ftruncate(fd, nbytes)


def _runs(places: Sequence[Place], buffers: Sequence[Tensor]) -> Iterator[slice]:
    """Slices whose slots are neighbours and can be moved in one call; never an empty buffer's."""
    start = nbytes = 0
    for index, (place, buffer) in enumerate(zip(places, buffers, strict=True)):
        if not buffer.numel():
            start, nbytes = index + 1, 0
            continue
        nbytes += place.size
        following = places[index + 1] if index + 1 < len(places) else None
        joined = (
            following is not None
            and (following.segment, following.slot) == (place.segment, place.slot + 1)
            and nbytes < _RUN_NBYTES
            and _fills(place, buffer)
            and _fills(following, buffers[index + 1])
        )
        if not joined:
            yield slice(start, index + 1)
            start, nbytes = index + 1, 0


def _fills(place: Place, buffer: Tensor) -> bool:
    return buffer.numel() == place.size and is_aligned(buffer)
