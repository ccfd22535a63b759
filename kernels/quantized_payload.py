"""Quantises the bytes of one block to a fixed size, for a codec of stores.

A row is one head's elements of one token. With ``limit`` 448 (fp8_e4m3) or 127 (int8), all in
float32: ``scale = max|x| / limit``, and each value is ``x * limit / max|x|``, rounded to nearest
even. So the error of an element is at most ``max|x| / 28`` of its row with fp8_e4m3 (relative to
the element itself 1/16), and ``max|x| / 254`` with int8. A row of zeros is restored as zeros; a row
with an element that is not finite is restored as NaN.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvconnect.errors import ConfigurationError, nearest
from kvconnect.layout import KvCacheLayout

LIMITS = {"fp8_e4m3": 448.0, "int8": 127.0}
"""The largest value that each code can represent."""

_STORED = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_MAX = torch.finfo(torch.float32).max
_CHUNK_ELEMENTS = 1 << 16
"""The elements of a chunk, whose float32 temporaries stay in the second-level cache."""


def quantized_nbytes(layout: KvCacheLayout) -> int:
    """Returns the bytes of a quantised block: a float32 scale for each row, then the values.

    Raises:
        ConfigurationError: the elements are not float64, float32, float16 or bfloat16.
    """
    if layout.dtype not in _DTYPES:
        raise ConfigurationError(
            f"dtype: blocks of {layout.dtype} cannot be quantised, only those of float64, "
            "float32, float16 and bfloat16; use a lossless codec"
        )
    return 4 * _num_rows(layout) + layout.block_nbytes // layout.dtype.itemsize


def quantize_payload(payload: Tensor, layout: KvCacheLayout, out: Tensor, *, dtype: str) -> None:
    """Quantises a block's bytes to `out`, as the module describes.

    Args:
        payload: 1-D contiguous uint8 host tensor of ``layout.block_nbytes``, aligned to elements.
        layout: the layout of the block.
        out: 1-D contiguous uint8 host tensor of `quantized_nbytes`, 4-byte-aligned; changed.
        dtype: ``"fp8_e4m3"`` or ``"int8"``.

    Raises:
        ConfigurationError: an argument is not as described; nothing was written.
    """
    for rows, values, scales in _parts(payload, layout, out, dtype):
        exact = rows.float() if rows.dtype == torch.float64 else rows
        quantized, scale = quantize_rows(exact, dtype)
        values.copy_(quantized)
        scales.copy_(scale)


def dequantize_payload(encoded: Tensor, layout: KvCacheLayout, out: Tensor, *, dtype: str) -> None:
    """Restores a block's bytes from `encoded`, which `quantize_payload` made, and writes `out`.

    The content of `encoded` is not checked: any bytes of the right length give some block. Raises
    as `quantize_payload` does.
    """
    for rows, values, scales in _parts(out, layout, encoded, dtype):
        rows.copy_(values.view(_STORED[dtype]).float() * scales.unsqueeze(-1))


def quantize_rows(rows: Tensor, code: str) -> tuple[Tensor, Tensor]:
    """Quantises `rows` to values of one byte and a scale for each row.

    Args:
        rows: ``[..., dim]`` float32, float16 or bfloat16.
        code: ``"fp8_e4m3"`` or ``"int8"``.

    Returns:
        The values as uint8 ``[..., dim]`` and the scales as float32 ``[...]``.
    """
    limit = LIMITS[code]
    exact = rows.to(torch.float32, copy=True)
    largest = exact.abs().amax(-1, keepdim=True)  # NaN where one is
    scales = largest / limit
    exact.mul_((torch.full_like(largest, limit) / largest).clamp_(max=_MAX))
    finite = largest.isfinite()
    if not bool((finite & (largest > 0)).all()):
        exact.masked_fill_(~finite | (largest == 0), 0.0)
        scales.masked_fill_(~finite, torch.nan)
    exact.clamp_(-limit, limit)
    exact = exact if code == "fp8_e4m3" else exact.round_()
    return exact.to(_STORED[code]).view(torch.uint8), scales.squeeze(-1)


def _num_rows(layout: KvCacheLayout) -> int:
    planes = 2 if layout.value_dim else 1
    return layout.num_layers * planes * layout.tokens_per_block * layout.num_kv_heads


def _parts(
    payload: Tensor, layout: KvCacheLayout, encoded: Tensor, code: str
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Checks the arguments, and yields views of both buffers in parts.

    A part is rows ``[n, dim]``, their values as uint8 ``[n, dim]`` and their scales ``[n]``.
    """
    if code not in LIMITS:
        raise ConfigurationError(f"dtype='{code}': {nearest(code, LIMITS)}")
    for name, buffer, nbytes in (
        ("payload", payload, layout.block_nbytes),
        ("encoded", encoded, quantized_nbytes(layout)),
    ):
        if buffer.dtype != torch.uint8 or buffer.shape != (nbytes,) or buffer.stride() != (1,):
            raise ConfigurationError(
                f"{name}: {nbytes} contiguous bytes are needed, this is {buffer.dtype} "
                f"{tuple(buffer.shape)}"
            )
    num_rows = _num_rows(layout)
    scales, values = encoded[: 4 * num_rows].view(torch.float32), encoded[4 * num_rows :]
    rows = payload.view(layout.dtype)
    if layout.kv_factor == 2:
        return _chunks(rows.view(-1, layout.key_dim), values.view(-1, layout.key_dim), scales)
    return _uneven_parts(rows, values, scales, layout)


def _uneven_parts(
    rows: Tensor, values: Tensor, scales: Tensor, layout: KvCacheLayout
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields the parts, as `_parts` does, of planes whose keys and values differ in dim."""
    heads = layout.tokens_per_block * layout.num_kv_heads
    keys = heads * layout.key_dim
    planes = (rows.view(-1, layout.plane_elements), values.view(-1, layout.plane_elements))
    for layer in range(layout.num_layers):
        for low, high, dim in ((0, keys, layout.key_dim), (keys, None, layout.value_dim)):
            if dim:
                own = [plane[layer, low:high].view(-1, dim) for plane in planes]
                yield own[0], own[1], scales[:heads]
                scales = scales[heads:]


def _chunks(
    rows: Tensor, values: Tensor, scales: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    size = max(1, _CHUNK_ELEMENTS // rows.shape[1])
    for start in range(0, len(rows), size):
        part = slice(start, start + size)
        yield rows[part], values[part], scales[part]
