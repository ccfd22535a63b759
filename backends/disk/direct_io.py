"""Whole reads and writes at an offset, past the page cache where the filesystem lets us."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from kvconnect.frame import ALIGNMENT

__all__ = ["aligned_size", "is_aligned", "open_direct", "read_at", "view", "write_at"]

_O_DIRECT = getattr(os, "O_DIRECT", 0)
# The most buffers that one system call takes on every POSIX system we know of.
_MAX_BUFFERS = 1024


def aligned_size(nbytes: int) -> int:
    """`nbytes` rounded up to what direct I/O can move; at least one unit of it."""
    return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT


def is_aligned(buffer: Tensor) -> bool:
    """Whether direct I/O can use `buffer` as it is."""
    return buffer.data_ptr() % ALIGNMENT == 0 and buffer.numel() % ALIGNMENT == 0


def view(buffer: Tensor) -> memoryview:
    """The bytes of `buffer`, a 1-D contiguous uint8 host tensor."""
    return buffer.numpy().data


def scratch(nbytes: int) -> memoryview:
    """An aligned buffer of at least `nbytes`, for bytes whose own buffer is not aligned."""
    return memoryview(mmap.mmap(-1, aligned_size(nbytes)))


def open_direct(path: str | os.PathLike[str], flags: int) -> int:
    """A file descriptor for direct I/O, or for buffered I/O where the filesystem has no other.

    Raises:
        OSError: as `os.open`.
    """
    try:
        return os.open(path, flags | _O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL or not _O_DIRECT:
            raise
    return os.open(path, flags & ~os.O_EXCL | os.O_CLOEXEC, 0o600)


def read_at(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill `buffers` from `offset` on; return the bytes read, fewer only at the end of the file.

    Buffers, their lengths and `offset` are aligned. Blocks.

    Raises:
        OSError: `buffers` are undefined.
    """
    return _whole(os.preadv, fd, buffers, offset)


def write_at(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write `buffers` at `offset`. Aligned as for `read_at`. Blocks.

    Raises:
        OSError: any part of them may have been written.
    """
    need = sum(len(buffer) for buffer in buffers)
    if _whole(os.pwritev, fd, buffers, offset) < need:
        raise OSError(errno.ENOSPC, "short write")


def _whole(
    call: Callable[[int, list[memoryview], int], int],
    fd: int,
    buffers: Sequence[memoryview],
    offset: int,
) -> int:
    # Short transfers are continued; 0 is the end of the file.
    need, done = sum(len(buffer) for buffer in buffers), 0
    while done < need:
        rest = list(_rest(buffers, done))[:_MAX_BUFFERS]
        try:
            moved = call(fd, rest, offset + done)
        except OSError as error:
            # Direct I/O refused after all, or a short transfer ended off its alignment.
            if error.errno != errno.EINVAL or not _to_buffered(fd):
                raise
            continue
        if moved <= 0:
            break
        done += moved
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
