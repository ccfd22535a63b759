"""Rows and blocks quantised by torch, in few passes over memory that stays in the caches."""

from __future__ import annotations

import torch
from torch import Tensor

from kvconnect.kernels.blocks.work import QuantizeWork
from kvconnect.kernels.host.reference import LIMITS, dequantize

__all__ = ["CHUNK_ELEMENTS", "convert_blocks", "quantize_rows"]

CHUNK_ELEMENTS = 1 << 16
"""So many at a time, their float32 temporaries stay in the second-level cache."""

_MAX = torch.finfo(torch.float32).max


def quantize_rows(rows: Tensor, code: str) -> tuple[Tensor, Tensor]:
    """The same as `reference.quantize`, bit for bit, at two to three times its speed."""
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
    values = exact.to(torch.float8_e4m3fn) if code == "fp8_e4m3" else exact.round_().to(torch.int8)
    return values.view(torch.uint8), scales.squeeze(-1)


def convert_blocks(work: QuantizeWork) -> None:
    """Carry out `work`, on the device where its memory is."""
    kv, value, row = work.kv, 0, 0
    num_rows = kv.tokens * kv.heads
    size = max(1, CHUNK_ELEMENTS // (num_rows * kv.key_dim))
    ids, rows = (
        torch.split(torch.from_numpy(part).to(kv.device), size)
        for part in (work.ids.ids, work.ids.positions)
    )
    for view in kv.views:
        num_values = num_rows * view.shape[3]
        own, own_rows = slice(value, value + num_values), slice(row, row + num_rows)
        for blocks, where in zip(ids, rows, strict=True):
            if work.forward:
                values, scales = quantize_rows(view.index_select(0, blocks), work.code)
                work.values[where, own] = values.flatten(1)
                work.scales[where, own_rows] = scales.flatten(1)
            else:
                shape = (len(blocks), *view.shape[1:])
                values = work.values[where, own].view(shape)
                scales = work.scales[where, own_rows].view(shape[:3])
                view.index_copy_(0, blocks, dequantize(values, scales, work.code, view.dtype))
        value, row = value + num_values, row + num_rows
