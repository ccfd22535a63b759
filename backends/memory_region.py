"""One region of host memory, cut into units."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from kvconnect.errors import ConfigurationError

__all__ = ["MemoryRegion"]


class MemoryRegion:
    """`nbytes` of memory in units of `unit` bytes, pinned where there is CUDA.

    Knows nothing of what is where. Different units may be read and written from several threads.

    Raises:
        ConfigurationError: there is not so much memory.
    """

    def __init__(self, nbytes: int, unit: int) -> None:
        self.unit = unit
        self.num_units = nbytes // unit
        try:
            self._bytes = _allocate(self.num_units * unit)
        except (OSError, ValueError, OverflowError, RuntimeError) as error:
            raise ConfigurationError(
                f"capacity={nbytes}: so much memory cannot be reserved ({error}); give less"
            ) from error

    def units_of(self, nbytes: int) -> int:
        """How many units a block of `nbytes` takes."""
        return -(-nbytes // self.unit)

    def read(self, units: Sequence[int], into: Tensor) -> None:
        """Copy the bytes of `units`, in order, to `into`, as many as fit it."""
        for part, target in self._parts(units, into):
            _copy(part, target)

    def write(self, units: Sequence[int], data: Tensor) -> None:
        """Copy `data` to `units`, in order."""
        for part, source in self._parts(units, data):
            _copy(source, part)

    def _parts(self, units: Sequence[int], buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        # Pairs of equal length: neighbouring units of the region, and their piece of the buffer.
        nbytes, done, index = buffer.numel(), 0, 0
        while done < nbytes:
            first = index
            index += 1
            while index < len(units) and units[index] == units[index - 1] + 1:
                index += 1
            length = min((index - first) * self.unit, nbytes - done)
            start = units[first] * self.unit
            yield self._bytes[start : start + length], buffer[done : done + length]
            done += length


def _copy(source: Tensor, target: Tensor) -> None:
    # memcpy on this thread, without the interpreter's lock. torch would share the copy with threads
    # of its own: slower than memcpy on one, and far slower where the cores are busy.
    np.copyto(target.numpy(), source.numpy())


def _allocate(nbytes: int) -> Tensor:
    if torch.cuda.is_available():
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    # Anonymous memory is taken as it is touched; huge pages make that 10x cheaper.
    region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them: slower the first time
            region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=torch.uint8)
