"""Validated work on its way to a device: plain numbers and addresses, and what keeps them valid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvconnect.kernels.blocks.runs import RunTable
from kvconnect.kernels.blocks.strips import PlaneBytes

__all__ = ["AppendWork", "BlockCopy", "Ids", "QuantizeWork", "TransposeWork", "UpdateWork"]

Ids: TypeAlias = npt.NDArray[np.int64]
"""Block ids on the host: 1-D int64, contiguous."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockCopy:
    """A copy of blocks, run by run.

    Run ``r`` of pair ``i`` goes from ``source + r.source_offset + source_ids[i] * r.source_step``
    to ``target + r.target_offset + target_ids[i] * r.target_step``.

    Attributes:
        table: the runs. With `num_tokens` they are whole tokens, of one plane each.
        source, target: addresses that the offsets of the table count from.
        source_ids, target_ids: ``[pairs]`` in range, without padding; on the device also int32, and
            out of range or -1: those pairs are skipped.
        num_tokens: ``[pairs]``; of run ``r`` the first
            ``clamp(num_tokens[i] - r.first_token, 0, r.nbytes / r.token_nbytes)`` tokens;
            ``None``: all.
        nbytes: what is copied in all.
        source_device, target_device: where the memory is.
        source_pinned, target_pinned: whether it is page-locked host memory.
        source_limit, target_limit: blocks on each side.
        stable_source: the host wrote the source before the call and leaves it alone until the
            `Transfer` is done, so that it may be read at once.
        keep: what keeps the memory alive.
    """

    table: RunTable
    source: int
    target: int
    source_ids: Ids | Tensor
    target_ids: Ids | Tensor
    num_tokens: Ids | None
    nbytes: int
    source_device: torch.device
    target_device: torch.device
    source_pinned: bool
    target_pinned: bool
    source_limit: int
    target_limit: int
    stable_source: bool
    keep: tuple[object, ...]


@dataclass(frozen=True, slots=True, eq=False)
class UpdateWork:
    """One `kv_cache_update`. Strides are in bytes.

    Attributes:
        cache: address of ``[batch, heads, max_length, row]``.
        cache_strides: of batch, head and position.
        update: address of ``[batch, heads, length, row]``, or packed ``[tokens, heads, row]``.
        update_strides: of batch (packed: 0), head and token.
        row_nbytes: of one head of one token.
        batch, heads, max_length: of the cache.
        length: of the update: tokens of each sequence; packed: of all together.
        write_indices: ``[batch]`` int32 or int64, on the device or the host. On the host they are
            valid; on the device they are clamped and counted in the error word.
        update_lengths: ``[batch + 1]`` cumulative, where the update is packed.
        device: where cache and update are.
        keep: what keeps the memory alive.
    """

    cache: int
    cache_strides: tuple[int, int, int]
    update: int
    update_strides: tuple[int, int, int]
    row_nbytes: int
    batch: int
    heads: int
    max_length: int
    length: int
    write_indices: Tensor
    update_lengths: Tensor | None
    device: torch.device
    keep: tuple[object, ...]


@dataclass(frozen=True, slots=True, eq=False)
class AppendWork:
    """One `reshape_and_cache`. Strides are in bytes.

    Attributes:
        sources: addresses of the new keys, and of the new values unless the cache has none:
            ``[tokens, heads, row]``.
        source_strides: of token and head, for each source.
        planes: where each of them goes; offsets are addresses.
        slots: ``[tokens]`` int32 or int64, block times tokens per block plus token; -1 is skipped.
            On the host they are valid; on the device others are skipped and counted.
        num_tokens: new tokens.
        block_tokens, heads, num_blocks: of the cache.
        device: where all of it is.
        keep: what keeps the memory alive.
    """

    sources: tuple[int, ...]
    source_strides: tuple[tuple[int, int], ...]
    planes: tuple[PlaneBytes, ...]
    slots: Tensor
    num_tokens: int
    block_tokens: int
    heads: int
    num_blocks: int
    device: torch.device
    keep: tuple[object, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TransposeWork:
    """Rows of ``[outer, tokens, heads]`` from one order of strides to another; all in bytes.

    Attributes:
        source, target: addresses.
        source_strides, target_strides: of outer, token and head.
        outer, tokens, heads: how many.
        row_nbytes: contiguous on both sides.
        device: where both are.
        keep: what keeps the memory alive.
    """

    source: int
    target: int
    source_strides: tuple[int, int, int]
    target_strides: tuple[int, int, int]
    outer: int
    tokens: int
    heads: int
    row_nbytes: int
    device: torch.device
    keep: tuple[object, ...]


@dataclass(frozen=True, slots=True, eq=False)
class QuantizeWork:
    """Blocks to values of one byte and scales, or back; see `kvconnect.kernels.quantize`.

    Attributes:
        planes: where the elements of `dtype` are; offsets are addresses.
        tokens, heads: of a block.
        tokens_first: the order of rows in values and scales: NHD, else HND.
        block_ids: ``[n]`` in range, without padding.
        places: ``[n]``: which row of values and scales belongs to each.
        values, scales: addresses.
        values_step, scales_step: bytes from one block's values (scales) to the next one's.
        dtype: of the cache: float32, float16 or bfloat16.
        code: ``"fp8_e4m3"`` or ``"int8"``.
        forward: quantise; else dequantise.
        num_blocks: of the cache.
        device: where all of it is.
        keep: what keeps the memory alive.
    """

    planes: tuple[PlaneBytes, ...]
    tokens: int
    heads: int
    tokens_first: bool
    block_ids: Ids
    places: Ids
    values: int
    scales: int
    values_step: int
    scales_step: int
    dtype: torch.dtype
    code: str
    forward: bool
    num_blocks: int
    device: torch.device
    keep: tuple[object, ...]
