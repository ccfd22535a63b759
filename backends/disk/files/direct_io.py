"""The system calls that read and write slots, past the page cache where that is possible."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvconnect.backends.disk.files.own_file import open_own
from kvconnect.frame import ALIGNMENT, FrameChecksum

if TYPE_CHECKING:
    from torch import Tensor

_O_DIRECT = getattr(os, "O_DIRECT", 0)
# The most buffers of one system call on every known POSIX system.
_MAX_BUFFERS = 1024
# The bytes that a thread moves at a time; neighbouring slots share a system call up to this size.
# Smaller parts cost more thread switches; with larger ones a call has too little I/O in parallel.
_PART_NBYTES = 8 << 20


@dataclass(frozen=True, slots=True, order=True)
class Location:
    """The location of a slot of `size` bytes."""

    segment: int
    slot: int
    size: int

    @property
    def key(self) -> tuple[int, int]:
        """The identity of the slot in the index."""
        return self.segment, self.slot

    @property
    def offset(self) -> int:
        """The offset of the slot in the segment's file, in bytes."""
        return self.slot * self.size


@dataclass(frozen=True, slots=True)
class Run:
    """The bytes moved in one system call: neighbours in the file of `location`.

    `buffers` are aligned, or there is only one. `checksums` are of the frames that begin in them:
    the thread that writes them seals these, the one that reads them hashes what it has read.
    """

    location: Location
    offset: int
    buffers: Sequence[Tensor]
    checksums: Sequence[FrameChecksum] = ()


def parts(
    locations: Sequence[Location],
    buffers: Sequence[Tensor],
    checksums: Sequence[FrameChecksum] = (),
) -> Iterator[list[Run]]:
    """Yields all runs in order, about `_PART_NBYTES` at a time.

    `checksums` has one element for each buffer, or none.
    """
    part: list[Run] = []
    nbytes = 0
    for run in _runs(locations, buffers, checksums):
        part.append(run)
        nbytes += sum(buffer.numel() for buffer in run.buffers)
        if nbytes >= _PART_NBYTES:
            yield part
            part, nbytes = [], 0
    if part:
        yield part


def _runs(
    locations: Sequence[Location], buffers: Sequence[Tensor], checksums: Sequence[FrameChecksum]
) -> Iterator[Run]:
    """Yields the runs: bytes moved in one call, at most `_PART_NBYTES`; never an empty buffer."""
    start = 0
    while start < len(locations):
        location, buffer = locations[start], buffers[start]
        nbytes = buffer.numel()
        stop = start + 1
        if is_aligned(buffer):
            while (
                stop < len(locations)
                and nbytes < _PART_NBYTES
                and _joined(locations, buffers, stop)
            ):
                nbytes += buffers[stop].numel()
                stop += 1
        if nbytes <= _PART_NBYTES or stop - start > 1 or not is_aligned(buffer):
            if nbytes:
                yield Run(location, location.offset, buffers[start:stop], checksums[start:stop])
        else:
            for at in range(0, nbytes, _PART_NBYTES):
                begun = checksums[start:stop] if at == 0 else ()
                yield Run(location, location.offset + at, [buffer[at : at + _PART_NBYTES]], begun)
        start = stop


def _joined(locations: Sequence[Location], buffers: Sequence[Tensor], at: int) -> bool:
    """Returns whether slot `at` is read or written with the one before it."""
    before, location = locations[at - 1], locations[at]
    return (
        location.key == (before.segment, before.slot + 1)
        and buffers[at - 1].numel() == before.size
        and buffers[at].numel() == location.size
        and is_aligned(buffers[at])
    )


def aligned_size(nbytes: int) -> int:
    """Returns `nbytes` rounded up to a multiple of `ALIGNMENT`, at least one multiple."""
    return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT


def is_aligned(buffer: Tensor) -> bool:
    """Returns whether direct I/O can use `buffer` as it is."""
    return buffer.data_ptr() % ALIGNMENT == 0 and buffer.numel() % ALIGNMENT == 0


def view(buffer: Tensor) -> memoryview:
    """Returns the bytes of `buffer`, a 1-D contiguous uint8 host tensor."""
    return buffer.numpy().data


def scratch(nbytes: int) -> memoryview:
    """Returns an aligned buffer of at least `nbytes`, for bytes whose own buffer is not aligned."""
    return memoryview(mmap.mmap(-1, aligned_size(nbytes)))


def open_direct(path: Path, flags: int) -> int:
    """Returns a file descriptor for direct I/O, or for buffered I/O if that is not supported.

    Raises:
        ForeignFile: a file of another kind or owner has the name.
        OSError: raised by `os.open`.
    """
    try:
        return open_own(path, flags | _O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL or not _O_DIRECT:
            raise
    return open_own(path, flags & ~os.O_EXCL)


def write_at(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Writes `buffers` at `offset`. Both are aligned as for `moved`. Blocks.

    Raises:
        OSError: writing failed; any part may have been written.
    """
    need = sum(len(buffer) for buffer in buffers)
    if moved(os.pwritev, fd, buffers, offset) < need:
        raise OSError(errno.ENOSPC, "short write")


def moved(
    call: Callable[[int, list[memoryview], int], int],
    fd: int,
    buffers: Sequence[memoryview],
    offset: int,
) -> int:
    """Moves the bytes of `buffers` from `offset` of the file on, or to there; returns their number.

    It moves fewer only at the end of the file. Buffers, their lengths and `offset` are aligned.
    Blocks.

    Args:
        call: `os.preadv`, which fills `buffers`, or `os.pwritev`, which writes them.
        fd: the file.
        buffers: the memory, in order.
        offset: the offset in the file.

    Raises:
        OSError: `call` failed; after a read `buffers` are undefined, after a write any part of the
            file may have been written.
    """
    # Short transfers are continued.
    need, done = sum(len(buffer) for buffer in buffers), 0
    while done < need:
        rest = list(_rest(buffers, done))[:_MAX_BUFFERS]
        try:
            nbytes = call(fd, rest, offset + done)
        except OSError as error:
            # Direct I/O was refused, or a short transfer ended at an unaligned offset.
            if error.errno != errno.EINVAL or not _to_buffered(fd):
                raise
            continue
        if nbytes <= 0:
            break
        done += nbytes
    return done


def _rest(buffers: Sequence[memoryview], done: int) -> Iterator[memoryview]:
    for buffer in buffers:
        if done < len(buffer):
            yield buffer[done:] if done else buffer
        done = max(0, done - len(buffer))


def _to_buffered(fd: int) -> bool:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if not flags & _O_DIRECT:
        return False
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~_O_DIRECT)
    return True
