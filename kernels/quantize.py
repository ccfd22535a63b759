"""KV blocks as values of one byte with a scale for each row, and back.

A row is one head's elements of one token. With ``limit`` 448 (fp8_e4m3) or 127 (int8), all in
float32: ``scale = max|x| / limit``, and each value is ``x * limit / max|x|``, rounded to nearest
even. So the error of an element is at most ``max|x| / 28`` of its row with fp8_e4m3 (relative to
the element itself 1/16), and ``max|x| / 254`` with int8. A row of zeros comes back as zeros; a row
with an element that is not finite comes back as NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvconnect.errors import ConfigurationError, nearest
from kvconnect.kernels.blocks.block_ids import BlockIds, check_targets, host_ids, unpadded
from kvconnect.kernels.blocks.buffers import typed_rows
from kvconnect.kernels.blocks.paged import PagedKv, bound
from kvconnect.kernels.blocks.transfer import DONE, Transfer
from kvconnect.kernels.blocks.work import QuantizeWork
from kvconnect.kernels.fallback import run_plainly, tried
from kvconnect.kernels.host import reference
from kvconnect.kernels.host.quantize import convert_blocks
from kvconnect.kernels.library import register

__all__ = ["CODES", "dequantize_blocks", "quantize_blocks"]

CODES = tuple(reference.LIMITS)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_VALUE_DTYPES = {
    "fp8_e4m3": (torch.float8_e4m3fn, torch.uint8),
    "int8": (torch.int8, torch.uint8),
}


def quantize_blocks(
    kv: PagedKv,
    block_ids: BlockIds,
    out_values: Tensor,
    out_scales: Tensor,
    *,
    dtype: str,
    stream: Any = None,
) -> Transfer:
    """Quantise blocks into contiguous buffers, in one pass.

    Args:
        kv: where the blocks are; float32, float16 or bfloat16.
        block_ids: ``[n]`` on the host, may repeat; rows of -1 are left as they are.
        out_values: ``[n, elements of a block]`` of uint8, or of the type `dtype` names; in the
            order of `gather_blocks`.
        out_scales: ``[n, elements / dim]`` float32: of each row, in the same order.
        dtype: ``"fp8_e4m3"`` or ``"int8"``.
        stream: a `torch.cuda.Stream`; ignored on the host.

    Raises:
        TypeError: wrong dtypes.
        ValueError: wrong shapes or strides.
        IndexError: an id is out of range.
        RuntimeError: devices differ. Nothing was written.
    """
    if torch.compiler.is_compiling():
        ids = torch.as_tensor(block_ids)
        _quantize(list(kv.views), ids, out_values, out_scales, kv.layout, kv.per_layer, dtype)
        return DONE
    return _run(_work(kv, block_ids, out_values, out_scales, dtype, forward=True), stream)


def dequantize_blocks(
    values: Tensor,
    scales: Tensor,
    kv: PagedKv,
    block_ids: BlockIds,
    *,
    dtype: str,
    stream: Any = None,
) -> Transfer:
    """Fill blocks with what `quantize_blocks` wrote: its mirror.

    Args:
        values: as `out_values` there.
        scales: as `out_scales` there.
        kv: where the blocks are; changed.
        block_ids: ``[n]`` on the host, distinct; rows of -1 are skipped.
        dtype: what they were quantised to.
        stream: a `torch.cuda.Stream`; ignored on the host.

    Raises:
        TypeError, ValueError, IndexError, RuntimeError: as `quantize_blocks`; also ``ValueError``
            for an id that is given twice. Nothing was written.
    """
    if torch.compiler.is_compiling():
        ids = torch.as_tensor(block_ids)
        _dequantize(values, scales, list(kv.views), ids, kv.layout, kv.per_layer, dtype)
        return DONE
    work = _work(kv, block_ids, values, scales, dtype, forward=False)
    check_targets("block_ids", work.ids.ids)
    return _run(work, stream)


def _work(
    kv: PagedKv, block_ids: BlockIds, values: Tensor, scales: Tensor, code: str, *, forward: bool
) -> QuantizeWork:
    names = ("out_values", "out_scales") if forward else ("values", "scales")
    if code not in CODES:
        raise ConfigurationError(f"dtype='{code}': {nearest(code, CODES)}")
    if kv.dtype not in _DTYPES:
        raise TypeError(f"kv: {kv.dtype}; one of {_DTYPES} is needed")
    if values.dtype not in _VALUE_DTYPES[code]:
        raise TypeError(f"{names[0]}: {values.dtype}; one of {_VALUE_DTYPES[code]} is needed")
    if scales.dtype != torch.float32:
        raise TypeError(f"{names[1]}: {scales.dtype}; torch.float32 is needed")
    for name, tensor in zip(names, (values, scales), strict=True):
        if tensor.device != kv.device:
            raise RuntimeError(f"{name}: on {tensor.device}, the cache is on {kv.device}")
    ids = host_ids("block_ids", block_ids, kv.num_blocks)
    elements = kv.block_nbytes // kv.dtype.itemsize
    as_bytes = typed_rows(names[0], values, len(ids), elements).view(torch.uint8)
    as_rows = typed_rows(names[1], scales, len(ids), len(kv.views) * kv.tokens * kv.heads)
    return QuantizeWork(kv, unpadded(ids), as_bytes, as_rows, code, forward)


def _run(work: QuantizeWork, stream: Any) -> Transfer:
    if not len(work.ids.ids):
        return DONE
    where = work.kv.device
    done = tried(where, lambda device: device.quantize(work, stream))
    return done or run_plainly(lambda: convert_blocks(work), where, stream, work)


# ---------------------------------------------------------------------------- as torch sees them


@register("quantize_blocks", changes="out_values out_scales")
def _quantize(
    planes: list[Tensor],
    block_ids: Tensor,
    out_values: Tensor,
    out_scales: Tensor,
    layout: str,
    per_layer: int,
    dtype: str,
) -> None:
    quantize_blocks(
        bound(planes, layout, per_layer), block_ids, out_values, out_scales, dtype=dtype
    )


@register("dequantize_blocks", changes="planes")
def _dequantize(
    values: Tensor,
    scales: Tensor,
    planes: list[Tensor],
    block_ids: Tensor,
    layout: str,
    per_layer: int,
    dtype: str,
) -> None:
    dequantize_blocks(values, scales, bound(planes, layout, per_layer), block_ids, dtype=dtype)
