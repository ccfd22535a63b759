"""What the machine can do, measured in the same run as what is compared with it."""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

__all__ = ["cold_read_seconds", "copy_seconds", "median_seconds"]

_READ_NBYTES = 1 << 20


def median_seconds(action: Callable[[], object], repeats: int = 5) -> float:
    """The median time of `action` over so many calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def cold_read_seconds(path: Path, nbytes: int, *, threads: int = 1, repeats: int = 5) -> float:
    """Median seconds to read the first `nbytes` of a file, past the page cache.

    O_DIRECT where the filesystem has it, else buffered with the file's pages dropped first. Blocks.
    """
    flags = os.O_RDONLY | getattr(os, "O_DIRECT", 0)
    try:
        descriptor = os.open(path, flags)
    except OSError:
        descriptor = os.open(path, os.O_RDONLY)
    offsets = range(0, nbytes - nbytes % 4096, _READ_NBYTES)
    # Anonymous maps are page-aligned, as O_DIRECT wants them.
    with mmap.mmap(-1, nbytes + _READ_NBYTES) as memory, ThreadPoolExecutor(threads) as pool:
        target = memoryview(memory)

        def read(offset: int) -> int:
            return os.preadv(descriptor, [target[offset : offset + _READ_NBYTES]], offset)

        def read_all() -> None:
            list(pool.map(read, offsets))

        def drop_and_read() -> float:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            read_all()
            return time.perf_counter() - start

        target[:] = bytes(len(target))  # the first touch of memory is not the disk's time
        seconds = statistics.median(drop_and_read() for _ in range(repeats))
        target.release()
    os.close(descriptor)
    return seconds


def copy_seconds(nbytes: int, *, repeats: int = 5) -> float:
    """Median seconds of one memcpy of `nbytes` on the host, cold source, one thread per core."""
    source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    spoiler = torch.ones(64 << 20, dtype=torch.uint8)

    def spoil_and_copy() -> float:
        spoiler.add_(1)
        start = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - start

    return statistics.median(spoil_and_copy() for _ in range(repeats))
