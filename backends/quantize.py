"""One byte per element: blocks of KV with a float32 scale for each token and head.

What is stored is all scales, then all values, both in the order of the block's planes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from kvconnect.errors import ConfigurationError
from kvconnect.layout import KvCacheLayout

__all__ = ["QuantizedDtype", "dequantize", "quantize", "quantized_nbytes"]

QuantizedDtype = Literal["fp8", "int8"]

_SCALE_NBYTES = 4
_STORED = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
_LARGEST = {"fp8": 448.0, "int8": 127.0}
# Rows are converted so many elements at a time: in float32 they fit the processor's cache.
_ELEMENTS = 256 << 10


def quantized_nbytes(layout: KvCacheLayout) -> int:
    """Bytes of a quantized block of `layout`.

    Raises:
        ConfigurationError: it would be no smaller.
    """
    rows = sum(count for count, _ in _planes(layout))
    elements = layout.num_layers * layout.kv_factor * layout.plane_elements
    nbytes = rows * _SCALE_NBYTES + elements
    if not layout.dtype.is_floating_point or nbytes >= layout.block_nbytes:
        raise ConfigurationError(
            f"codec: {elements} elements of {layout.dtype} with {rows} scales would take "
            f"{nbytes} bytes instead of {layout.block_nbytes}; use a lossless codec"
        )
    return nbytes


def quantize(block: Tensor, out: Tensor, layout: KvCacheLayout, dtype: QuantizedDtype) -> None:
    """Write the block whose bytes are `block` to `out`, rounded to `dtype`.

    Rows with a value that is not finite come back as NaN. Blocks the calling thread; `block` and
    `out` are 1-D uint8 host tensors of ``layout.block_nbytes`` and `quantized_nbytes`, apart.
    """
    largest, stored = _LARGEST[dtype], _STORED[dtype]
    for source, scales, values in _parts(block, out, layout):
        rows = source.to(torch.float32)
        scale = rows.abs().amax(1, keepdim=True).div_(largest)
        scales.copy_(scale.view(torch.uint8).view(-1))
        # A row of zeros has scale 0.
        rounded = rows.div(scale.where(scale > 0, 1.0)).clamp_(-largest, largest)
        if dtype == "int8":
            rounded.round_()
        values.copy_(rounded.to(stored).view(torch.uint8))


def dequantize(
    quantized: Tensor, out: Tensor, layout: KvCacheLayout, dtype: QuantizedDtype
) -> None:
    """The inverse of `quantize`: fills `out`, the bytes of a block."""
    stored = _STORED[dtype]
    for target, scales, values in _parts(out, quantized, layout):
        # Bytes out of a frame may lie at any address.
        scale = scales.clone().view(torch.float32).view(-1, 1)
        target.copy_(values.view(stored).to(torch.float32).mul_(scale))


def _planes(layout: KvCacheLayout) -> Iterator[tuple[int, int]]:
    """Rows of neighbouring elements that share a scale: how many, and their length."""
    heads = layout.tokens_per_block * layout.num_kv_heads
    if layout.kv_factor == 2:
        yield layout.num_layers * 2 * heads, layout.key_dim
        return
    for _ in range(layout.num_layers):
        yield heads, layout.key_dim
        if layout.value_dim:
            yield heads, layout.value_dim


def _parts(
    block: Tensor, quantized: Tensor, layout: KvCacheLayout
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Rows of `block`, and in `quantized` the bytes of their scales and values; piece by piece."""
    elements = block.view(layout.dtype)
    scale_at, element_at = 0, 0
    value_at = sum(count for count, _ in _planes(layout)) * _SCALE_NBYTES
    for count, length in _planes(layout):
        step = max(1, _ELEMENTS // length)
        for first in range(0, count, step):
            rows = min(step, count - first)
            size = rows * length
            yield (
                elements[element_at : element_at + size].view(rows, length),
                quantized[scale_at : scale_at + rows * _SCALE_NBYTES],
                quantized[value_at : value_at + size].view(rows, length),
            )
            element_at += size
            value_at += size
            scale_at += rows * _SCALE_NBYTES
