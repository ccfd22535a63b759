"""Launches kernels over rows of bytes: widths, parameters, grids, ids."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy.typing as npt
from torch import Tensor

from kvconnect.errors import ConfigurationError
from kvconnect.kernels.cuda.compile.sources import CompiledPart, Kernel
from kvconnect.kernels.cuda.driver.interface import THREADS, Driver

__all__ = [
    "NO_IDS",
    "TILE",
    "Grid",
    "IdList",
    "Launcher",
    "Params",
    "Rows",
    "divisor",
    "span",
]

TILE = THREADS * 4
MAX_VECTORS = 2**31 - 1


@lru_cache(maxsize=4096)
def divisor(number: int) -> tuple[int, int]:
    """Returns the two int64 of a ``Divisor`` of the sources."""
    if not 1 <= number <= MAX_VECTORS:
        raise ConfigurationError(f"{number} rows or vectors are too many for one launch")
    shift = 31 + (number - 1).bit_length()
    multiplier = -(-(1 << shift) // number)
    return number, multiplier | shift << 32


class Rows(NamedTuple):
    """The rows that a launch copies: `num_rows` of `nbytes`, in accesses of `width` bytes."""

    num_rows: int
    nbytes: int
    width: int


def span(first: int, num_rows: int, vectors_per_row: int) -> tuple[int, ...]:
    """Returns the four int64 of a ``Span`` of the sources."""
    return first, num_rows * vectors_per_row, *divisor(vectors_per_row)


@dataclass(frozen=True, slots=True, eq=False)
class IdList:
    """The ``Ids`` of the sources: where int32 or int64 lie on the device, and their limit."""

    address: int
    width: int
    limit: int
    keep: object = None

    @property
    def params(self) -> tuple[int, int, int]:
        """The three int64."""
        return self.address, self.width, self.limit


NO_IDS = IdList(0, 8, 0)


class Grid(NamedTuple):
    """The stream and size of a launch.

    Attributes:
        stream: of the driver.
        max_ctas: blocks, at most.
    """

    stream: Any
    max_ctas: int


class Launcher:
    """Launches the kernels that move rows. Thread-safe.

    The caller keeps what a method returns until the launch is done.

    Args:
        driver: the device.
        max_vectors: of one launch; more rows take more launches.
    """

    def __init__(self, driver: Driver, *, max_vectors: int = MAX_VECTORS) -> None:
        self.driver = driver
        self.max_vectors = max_vectors

    def rows(self, entry: str, file: str, rows: Rows, params: Params, grid: Grid) -> None:
        """Launches ``entry`` over all rows, in as many launches as needed."""
        kernel = _kernel(file, entry, rows.width)
        per_row = rows.nbytes // rows.width
        divisor(rows.num_rows)  # more cannot be numbered
        at_once = max(1, self.max_vectors // per_row)
        for first in range(0, rows.num_rows, at_once):
            count = min(at_once, rows.num_rows - first)
            ctas = min(grid.max_ctas, -(-count * per_row // TILE))
            filled = params.filled(span(first, count, per_row))
            self.driver.launch(kernel, ctas, filled, grid.stream)

    def ids(self, ids: Tensor | npt.NDArray[Any], limit: int, stream: Any) -> IdList:
        """Returns the ids on the device: the same ones if they are there, or uploaded for `stream`.

        Raises:
            RuntimeError: they would have to be uploaded, and `stream` captures.
        """
        if isinstance(ids, Tensor) and self.driver.on_device(ids.device):
            return IdList(ids.data_ptr(), ids.element_size(), limit, ids)
        if self.driver.capturing(stream):
            raise RuntimeError(
                "ids: on the host, while a CUDA graph is captured; give them as a tensor on the "
                "device"
            )
        data = ids.numpy() if isinstance(ids, Tensor) else ids
        memory = self.driver.upload(data, stream)
        return IdList(memory.address, data.itemsize, limit, memory)


class Params(NamedTuple):
    """The int64 of a parameter struct before its ``Span`` and behind it."""

    head: tuple[int, ...]
    tail: tuple[int, ...] = ()
    raw: bytes = b""

    def filled(self, span: tuple[int, ...]) -> array[int]:
        """Returns all int64 of the struct."""
        numbers = array("q", (*self.head, *span, *self.tail))
        if self.raw:
            numbers.frombytes(self.raw)
        return numbers


@lru_cache(maxsize=256)
def _kernel(file: str, entry: str, width: int) -> Kernel:
    return Kernel(CompiledPart(file, width), entry)
