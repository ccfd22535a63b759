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

TILE = THREADS * 4
MAX_VECTORS = 2**31 - 1


@lru_cache(maxsize=4096)
def divisor(number: int) -> tuple[int, int]:
    """Returns the two int64 of a ``Divisor`` struct of the CUDA sources, for division by `number`.

    Raises:
        ConfigurationError: `number` is not 1 to `MAX_VECTORS`.
    """
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
    """Returns the four int64 of a ``Span`` struct: `num_rows` rows of a launch from `first` on."""
    return first, num_rows * vectors_per_row, *divisor(vectors_per_row)


@dataclass(frozen=True, slots=True, eq=False)
class IdList:
    """The ``Ids`` struct of the CUDA sources: ids in memory of the device.

    Attributes:
        address: the address of the first id.
        width: the bytes of an id, 4 or 8.
        limit: valid ids are below it.
        keep: the object that keeps the memory alive.
    """

    address: int
    width: int
    limit: int
    keep: object = None

    @property
    def params(self) -> tuple[int, int, int]:
        """The three int64 of the struct."""
        return self.address, self.width, self.limit


NO_IDS = IdList(0, 8, 0)


class Grid(NamedTuple):
    """The stream and size of a launch.

    Attributes:
        stream: a stream of the driver.
        max_ctas: the most thread blocks.
    """

    stream: Any
    max_ctas: int


class Launcher:
    """Launches the kernels that move rows. Thread-safe.

    The caller keeps the result of a method until the launched kernels have ended.

    Args:
        driver: the device.
        max_vectors: the most vectors of one launch; more rows need several launches.
    """

    def __init__(self, driver: Driver, *, max_vectors: int = MAX_VECTORS) -> None:
        self.driver = driver
        self.max_vectors = max_vectors

    def rows(self, entry: str, file: str, rows: Rows, params: Params, grid: Grid) -> None:
        """Launches the kernel `entry` of ``file.cu`` over all rows, in as many launches as needed.

        Raises:
            ConfigurationError: there are 2^31 rows or more.
        """
        kernel = _kernel(file, entry, rows.width)
        per_row = rows.nbytes // rows.width
        divisor(rows.num_rows)  # raises if the rows cannot be numbered
        at_once = max(1, self.max_vectors // per_row)
        for first in range(0, rows.num_rows, at_once):
            count = min(at_once, rows.num_rows - first)
            ctas = min(grid.max_ctas, -(-count * per_row // TILE))
            filled = params.filled(span(first, count, per_row))
            self.driver.launch(kernel, ctas, filled, grid.stream)

    def ids(self, ids: Tensor | npt.NDArray[Any], limit: int, stream: Any) -> IdList:
        """Returns `ids` in memory of the device; uploads them on `stream` if they are on the host.

        Raises:
            RuntimeError: the ids are on the host, and `stream` captures a graph.
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
    """The parameter struct of a kernel without its ``Span``.

    Attributes:
        head: the int64 before the ``Span``.
        tail: the int64 behind it.
        raw: the bytes behind `tail`.
    """

    head: tuple[int, ...]
    tail: tuple[int, ...] = ()
    raw: bytes = b""

    def filled(self, span: tuple[int, ...]) -> array[int]:
        """Returns the struct as int64 values, with the fields of `span` in its ``Span``."""
        numbers = array("q", (*self.head, *span, *self.tail))
        if self.raw:
            numbers.frombytes(self.raw)
        return numbers


@lru_cache(maxsize=256)
def _kernel(file: str, entry: str, width: int) -> Kernel:
    return Kernel(CompiledPart(file, width), entry)
