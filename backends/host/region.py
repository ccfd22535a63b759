"""A region of host memory, cut into units."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvconnect.errors import ConfigurationError


class MemoryRegion:
    """A region of `nbytes` in units of `unit` bytes; page-locked if there is CUDA.

    It does not record what its units hold. Several threads may use different units at once.

    Attributes:
        tensor: the whole region: uint8[num_units * unit].

    Raises:
        ConfigurationError: so much memory cannot be allocated.
    """

    def __init__(self, nbytes: int, unit: int) -> None:
        self.unit = unit
        self.num_units = nbytes // unit
        try:
            self.tensor = _allocate(self.num_units * unit)
            self._bytes = self.tensor.numpy()
        except (OSError, ValueError, OverflowError, RuntimeError) as error:
            raise ConfigurationError(
                f"capacity={nbytes}: so much memory cannot be reserved ({error}); give less"
            ) from error

    def units_of(self, nbytes: int) -> int:
        """Returns how many units a block of `nbytes` takes."""
        return -(-nbytes // self.unit)

    def parts(
        self, units: Sequence[int], whole: NDArray[np.uint8], nbytes: int
    ) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Yields pairs of equal length: neighbours among `units`, and their piece of `whole`.

        They cover the first `nbytes` of `whole`.
        """
        done = 0
        for piece in self.views(units, nbytes):
            yield piece, whole[done : done + len(piece)]
            done += len(piece)

    def views(self, units: Sequence[int], nbytes: int) -> Iterator[NDArray[np.uint8]]:
        """Yields the first `nbytes` bytes of `units`, neighbours among them as one piece."""
        done = index = 0
        while done < nbytes:
            first = index
            index += 1
            while index < len(units) and units[index] == units[index - 1] + 1:
                index += 1
            length = min((index - first) * self.unit, nbytes - done)
            start = units[first] * self.unit
            yield self._bytes[start : start + length]
            done += length


def _allocate(nbytes: int) -> Tensor:
    if torch.cuda.is_available():
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    # Anonymous memory is allocated as it is touched; huge pages make that 10x cheaper.
    region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them: slower the first time
            region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=torch.uint8)
