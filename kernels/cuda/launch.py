"""Work as kernel launches: widths, parameters, grids."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy.typing as npt
from torch import Tensor

from kvconnect.errors import ConfigurationError
from kvconnect.kernels.blocks.work import AppendWork, TransposeWork, UpdateWork
from kvconnect.kernels.cuda.compile.sources import CompiledPart, Kernel, vector_nbytes
from kvconnect.kernels.cuda.driver import Driver

__all__ = [
    "NO_IDS",
    "THREADS",
    "TILE",
    "Grid",
    "IdList",
    "Launcher",
    "Params",
    "Rows",
    "divisor",
    "span",
]

THREADS = 256
TILE = THREADS * 4
MAX_VECTORS = 2**31 - 1


@lru_cache(maxsize=4096)
def divisor(number: int) -> tuple[int, int]:
    """The two int64 of a ``Divisor`` of the sources."""
    if not 1 <= number <= MAX_VECTORS:
        raise ConfigurationError(f"{number} rows or vectors are too many for one launch")
    shift = 31 + (number - 1).bit_length()
    multiplier = -(-(1 << shift) // number)
    return number, multiplier | shift << 32


class Rows(NamedTuple):
    """What a launch copies: `num_rows` of `nbytes`, in accesses of `width` bytes."""

    num_rows: int
    nbytes: int
    width: int


def span(first: int, num_rows: int, vectors_per_row: int) -> tuple[int, ...]:
    """The four int64 of a ``Span`` of the sources."""
    return first, num_rows * vectors_per_row, *divisor(vectors_per_row)


@dataclass(frozen=True, slots=True, eq=False)
class IdList:
    """``Ids`` of the sources: where int32 or int64 lie on the device, and their limit."""

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
    """Where a launch goes.

    Attributes:
        stream: of the driver.
        max_ctas: blocks, at most.
    """

    stream: Any
    max_ctas: int


class Launcher:
    """Launches the kernels that move rows. Thread-safe.

    Whatever a method returns is to be kept until the launch is done.

    Args:
        driver: the device.
        max_vectors: of one launch; more rows take more launches.
    """

    def __init__(self, driver: Driver, *, max_vectors: int = MAX_VECTORS) -> None:
        self.driver = driver
        self.max_vectors = max_vectors

    def rows(self, entry: str, file: str, rows: Rows, params: Params, grid: Grid) -> None:
        """Launch ``entry`` over all rows, as often as it takes."""
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
        """The ids on the device: where they are, or uploaded for `stream`.

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

    def update(self, work: UpdateWork, grid: Grid) -> tuple[object, ...]:
        """`kv_cache_update`, both forms."""
        starts = self.ids(work.write_indices, work.max_length, grid.stream)
        packed = work.update_lengths is not None
        lengths = NO_IDS
        if work.update_lengths is not None:
            lengths = self.ids(work.update_lengths, 0, grid.stream)
        tail = divisor(work.heads if packed else work.length)
        params = Params(
            (
                *(work.cache, *work.cache_strides),
                *(work.update, *work.update_strides),
                *starts.params,
                *lengths.params,
                *(work.batch, work.length),
                1 << (work.batch - 1).bit_length() - 1 if work.batch > 1 else 0,
                self.driver.error_word,
            ),
            (*tail, *divisor(work.heads)),
        )
        width = vector_nbytes(
            *(work.cache, work.update, work.row_nbytes, *work.cache_strides, *work.update_strides)
        )
        count = work.length * work.heads * (1 if packed else work.batch)
        entry = "update_packed" if packed else "update_padded"
        self.rows(entry, "update", Rows(count, work.row_nbytes, width), params, grid)
        return work.keep, starts, lengths

    def append(self, work: AppendWork, grid: Grid) -> tuple[object, ...]:
        """`reshape_and_cache`: keys and values in one launch if their rows are equally long."""
        num_slots = work.num_blocks * work.block_tokens
        slots = self.ids(work.slots, num_slots, grid.stream)
        sides = list(range(len(work.sources)))
        together = len({int(work.planes[side, 4]) for side in sides}) == 1
        errors = self.driver.error_word
        for some in [sides] if together else [[side] for side in sides]:
            self._append(work, some, slots, errors, grid)
            errors = 0  # a slot is counted once
        return work.keep, slots

    def _append(
        self, work: AppendWork, sides: Sequence[int], slots: IdList, errors: int, grid: Grid
    ) -> None:
        numbers: list[int] = []
        for side in sides:
            target, block, token, head, _ = map(int, work.planes[side])
            numbers += (work.sources[side], *work.source_strides[side], target, block, token, head)
        row = int(work.planes[sides[0], 4])
        bits = work.block_tokens.bit_length() - 1
        if work.block_tokens != 1 << bits:
            bits = -1
            divisor(slots.limit)  # such slots are divided as 32-bit numbers
        params = Params(
            (*numbers, *[0] * (14 - len(numbers)), *slots.params, work.num_tokens, errors),
            (
                *divisor(work.heads),
                *divisor(len(sides)),
                bits,
                *divisor(work.block_tokens),
            ),
        )
        rows = Rows(work.num_tokens * len(sides) * work.heads, row, vector_nbytes(row, *numbers))
        self.rows("append", "append", rows, params, grid)

    def transpose(self, work: TransposeWork, grid: Grid) -> tuple[object, ...]:
        """`transpose_blocks`: in the order of the target, so that writes are whole lines."""
        source, target = work.source_strides, work.target_strides
        counts = (work.tokens, work.heads)
        outer, inner = (0, 1) if target[1] >= target[2] else (1, 0)
        params = Params(
            (
                *(work.source, source[0], source[1 + outer], source[1 + inner]),
                *(work.target, target[0], target[1 + outer], target[1 + inner]),
            ),
            (*divisor(counts[inner]), *divisor(counts[outer])),
        )
        width = vector_nbytes(work.source, work.target, work.row_nbytes, *source, *target)
        rows = Rows(work.outer * work.tokens * work.heads, work.row_nbytes, width)
        self.rows("transpose", "transpose", rows, params, grid)
        return (work.keep,)


class Params(NamedTuple):
    """The int64 of a parameter struct before its ``Span`` and behind it."""

    head: tuple[int, ...]
    tail: tuple[int, ...] = ()
    raw: bytes = b""

    def filled(self, span: tuple[int, ...]) -> array[int]:
        """All of them."""
        numbers = array("q", (*self.head, *span, *self.tail))
        if self.raw:
            numbers.frombytes(self.raw)
        return numbers


@lru_cache(maxsize=256)
def _kernel(file: str, entry: str, width: int) -> Kernel:
    return Kernel(CompiledPart(file, (("VECTOR_NBYTES", width),)), entry)
