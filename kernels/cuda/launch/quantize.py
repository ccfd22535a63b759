"""Quantisation of blocks as kernel launches."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.kernels.blocks.work import QuantizeWork
from kvconnect.kernels.cuda.compile.sources import CompiledPart, Kernel, vector_nbytes
from kvconnect.kernels.cuda.driver.interface import THREADS, Memory
from kvconnect.kernels.cuda.launch.launcher import (
    TILE,
    Grid,
    Launcher,
    Params,
    divisor,
    span,
)

__all__ = ["launch_quantize"]

_ELEMENT_BITS: Final = {torch.float32: 32, torch.float16: 16, torch.bfloat16: 8}
"""What the source calls them."""

_PLANE = np.dtype(
    [(name, np.int64) for name in ("base", "block", "outer", "inner", "values", "scales")]
)
"""Its address, its strides, and where its values and scales begin in those of a block."""

_UNROLL = 4
_WARP = 32


def launch_quantize(launcher: Launcher, work: QuantizeWork, grid: Grid) -> tuple[object, ...]:
    """Give a stream the whole of `work`, forward or back: a launch for each length of rows.

    Returns:
        What is to be kept until that is done.

    Raises:
        RuntimeError: a graph is captured, but the ids are on the host.
    """
    ids = work.ids
    blocks = launcher.ids(ids.ids, work.kv.num_blocks, grid.stream)
    positions = launcher.ids(ids.positions, len(work.values), grid.stream)
    keep: list[object] = [work, blocks, positions]
    listed = (*blocks.params, *positions.params)
    for row_nbytes, planes in _planes_by_row(work.kv).items():
        keep.append(_launch(launcher, work, (planes, row_nbytes), listed, grid))
    return tuple(keep)


def _launch(
    launcher: Launcher,
    work: QuantizeWork,
    alike: tuple[npt.NDArray[np.void], int],
    listed: tuple[int, ...],
    grid: Grid,
) -> Memory:
    """Launch what concerns planes with rows of one length, and return where these are uploaded."""
    kv, (planes, row_nbytes) = work.kv, alike
    memory = launcher.driver.upload(planes, grid.stream)
    element_nbytes = kv.dtype.itemsize
    values_step, scales_step = work.values.stride(0), work.scales.stride(0) * 4
    values_at = work.values.data_ptr()
    # Values are a byte each, so what limits them limits accesses of elements times their size.
    limits = (values_at, values_step, *planes["values"].tolist())
    strides = [n for name in ("base", "block", "outer", "inner") for n in planes[name].tolist()]
    width = vector_nbytes(row_nbytes, *strides, *(limit * element_nbytes for limit in limits))
    vectors = row_nbytes // width
    lanes = min(_WARP, 1 << (-(-vectors // _UNROLL) - 1).bit_length())
    outer, inner = (kv.tokens, kv.heads) if kv.layout == "NHD" else (kv.heads, kv.tokens)
    num_rows = len(work.ids.ids) * len(planes) * kv.tokens * kv.heads
    divisor(num_rows)
    params = Params(
        (
            *(memory.address, *listed, len(work.ids.ids)),
            *(values_at, values_step, work.scales.data_ptr(), scales_step),
            *(vectors, lanes, launcher.driver.error_word),
        ),
        (*divisor(inner), *divisor(outer), *divisor(len(planes))),
    )
    defines = (
        ("VECTOR_NBYTES", width),
        ("ELEMENT_BITS", _ELEMENT_BITS[kv.dtype]),
        ("E4M3", int(work.code == "fp8_e4m3")),
    )
    kernel = Kernel(CompiledPart("quantize", defines), "quantize" if work.forward else "dequantize")
    # A quantising thread takes four vectors of one row, whose number alone matters then.
    per_row = 1 if work.forward else vectors
    at_once = max(1, launcher.max_vectors // per_row)
    per_cta = THREADS // lanes if work.forward else TILE
    for first in range(0, num_rows, at_once):
        count = min(at_once, num_rows - first)
        ctas = min(grid.max_ctas, -(-count * per_row // per_cta))
        filled = params.filled(span(first, count, per_row))
        launcher.driver.launch(kernel, ctas, filled, grid.stream)
    return memory


def _planes_by_row(kv: PagedKv) -> dict[int, npt.NDArray[np.void]]:
    """Bytes of a row: the planes with such rows, as `_PLANE`."""
    found: dict[int, list[tuple[int, ...]]] = {}
    rows = kv.tokens * kv.heads
    values = 0
    for number, plane in enumerate(kv.planes):
        strides = (plane.token, plane.head) if kv.layout == "NHD" else (plane.head, plane.token)
        line = (plane.offset, plane.block, *strides, values, number * rows * 4)
        found.setdefault(plane.row, []).append(line)
        values += plane.row // kv.dtype.itemsize * rows
    return {row: np.array(planes, _PLANE) for row, planes in found.items()}
