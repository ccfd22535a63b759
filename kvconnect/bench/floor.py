"""What the machine can do, measured in the same run as what is compared with it."""

from __future__ import annotations

import mmap
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

__all__ = ["cold_read_seconds", "first_pass_seconds"]

_READ_NBYTES = 1 << 20


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


def first_pass_seconds(nbytes: int, *, repeats: int = 5) -> float:
    """Median seconds to copy `nbytes` into host memory that was never touched before.

    That is what the pool of a new process is: its pages are taken as the copy arrives at them. The
    source is warm. torch copies with all its threads.
    """
    source = torch.ones(nbytes, dtype=torch.uint8)

    def copy() -> float:
        target = torch.from_numpy(np.zeros(nbytes, np.uint8))  # mapped, not yet there
        start = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - start

    return statistics.median(copy() for _ in range(repeats))
