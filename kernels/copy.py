"""Copies KV blocks: paged to contiguous and back, paged to paged, and between layouts.

Everything is checked before anything is written. On the host a copy is done when the function
returns. On a device it is enqueued behind the work of `stream` (by default torch's current one),
and the returned `Transfer` reports its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvconnect.kernels.block_copy import move_blocks
from kvconnect.kernels.blocks.block_ids import BlockIds
from kvconnect.kernels.blocks.buffers import layer_range
from kvconnect.kernels.blocks.moves import pair_moves, row_moves, split_mapping
from kvconnect.kernels.blocks.paged import PagedKv, bound
from kvconnect.kernels.blocks.transfer import DONE, Transfer
from kvconnect.kernels.library import register

_ALL = slice(None)


def gather_blocks(
    kv: PagedKv,
    block_ids: BlockIds,
    out: Tensor,
    *,
    layers: slice | range = _ALL,
    stream: Any = None,
    path: str = "auto",
) -> Transfer:
    """Copies blocks to a contiguous buffer: row i of `out` becomes block ``block_ids[i]``.

    Args:
        kv: the cache that is read.
        block_ids: ``[n]``; may repeat. The row of a -1 is unchanged.
        out: ``[n, bytes of a block]`` uint8, or as many elements of the cache's dtype, in any
            contiguous shape ``[n, ...]``; two axes may have any distance between rows. On the
            cache's device or in host memory. With pageable host memory the call blocks. `PagedKv`
            describes a row's content.
        layers: consecutive layers; a row then holds these only.
        stream: a `torch.cuda.Stream`; ignored on the host.
        path: ``"auto"``, or the way of the copy: ``"kernel"``, ``"dma"``, ``"staged"`` or
            ``"torch"``.

    Raises:
        TypeError: wrong dtypes.
        ValueError: wrong shapes, strides, layers or path.
        IndexError: an id on the host is out of range. (On the device such ids are skipped.)
        RuntimeError: devices differ, or no device has this path. Nothing was written.
    """
    numbers = layer_range(kv, layers)
    if torch.compiler.is_compiling():
        _gather(kv.layer_views(numbers), torch.as_tensor(block_ids), out, kv.layout, kv.per_layer)
        return DONE
    return move_blocks(row_moves(kv, block_ids, out, numbers, gathers=True), stream, path)


def scatter_blocks(
    src: Tensor,
    kv: PagedKv,
    block_ids: BlockIds,
    *,
    layers: slice | range = _ALL,
    stream: Any = None,
    path: str = "auto",
    stable_source: bool = False,
) -> Transfer:
    """Copies a contiguous buffer to blocks: block ``block_ids[i]`` becomes row i of `src`.

    This is the reverse of `gather_blocks`. Other layers than `layers` are unchanged.

    Args:
        src: of the shape and dtype of `out` of `gather_blocks`.
        kv: the cache that is written.
        block_ids: ``[n]``, distinct; rows of -1 are skipped.
        layers: the consecutive layers that `src` holds.
        stream: a `torch.cuda.Stream`; ignored on the host.
        path: as for `gather_blocks`.
        stable_source: whether `src` is host memory that is complete already and stays unchanged
            until the `Transfer` is done. Then it may be read before the stream reaches the copy.

    Raises:
        TypeError, ValueError, IndexError, RuntimeError: as `gather_blocks`; also ``ValueError`` for
            an id that is given twice. Nothing was written.
    """
    numbers = layer_range(kv, layers)
    if torch.compiler.is_compiling():
        _scatter(src, kv.layer_views(numbers), torch.as_tensor(block_ids), kv.layout, kv.per_layer)
        return DONE
    moves = row_moves(kv, block_ids, src, numbers, gathers=False)
    return move_blocks(moves, stream, path, stable_source=stable_source)


def copy_blocks(
    src_kv: PagedKv,
    dst_kv: PagedKv,
    block_mapping: BlockIds | Sequence[tuple[int, int]],
    num_tokens: BlockIds | None = None,
    *,
    layers: slice | range = _ALL,
    stream: Any = None,
    path: str = "auto",
    stable_source: bool = False,
) -> Transfer:
    """Copies blocks of one paged memory to another, or within one.

    Args:
        src_kv: the cache that is read.
        dst_kv: the cache that is written; may be `src_kv`. Of the same sizes, dtype and layout;
            strides and number of blocks may differ.
        block_mapping: ``[n, 2]``: a block of `src_kv` and its target block in `dst_kv`; a pair with
            -1 is skipped.
        num_tokens: ``[n]``, 0 to T: only so many leading tokens of each block are copied, and the
            slots of others are unchanged; ``None`` copies all.
        layers: consecutive layers; others are unchanged.
        stream: a `torch.cuda.Stream`; ignored on the host.
        path: as for `gather_blocks`.
        stable_source: as for `scatter_blocks`.

    Raises:
        TypeError: wrong dtypes.
        ValueError: wrong shapes, layouts, layers, path or `num_tokens`; a block is a target twice,
            or a source too.
        IndexError: an id on the host is out of range.
        RuntimeError: devices differ, or no device has this path. Nothing was written.
    """
    numbers = layer_range(src_kv, layers)
    if torch.compiler.is_compiling():
        _copy_traced(src_kv, dst_kv, block_mapping, num_tokens, numbers)
        return DONE
    sources, targets, some = split_mapping(block_mapping)
    moves = pair_moves(
        (src_kv, dst_kv), (sources, targets), numbers, num_tokens=num_tokens, some=some
    )
    return move_blocks(moves, stream, path, stable_source=stable_source)


# ---------------------------------------------------------------------------- as torch sees them


def _copy_traced(
    src_kv: PagedKv, dst_kv: PagedKv, mapping: Any, num_tokens: Any, layers: range
) -> None:
    pairs = torch.as_tensor(mapping)
    counts = None if num_tokens is None else torch.as_tensor(num_tokens)
    if src_kv is dst_kv:
        _move(src_kv.layer_views(layers), pairs, counts, src_kv.layout, src_kv.per_layer)
    else:
        sources, targets = src_kv.layer_views(layers), dst_kv.layer_views(layers)
        _copy(sources, targets, pairs, counts, src_kv.layout, src_kv.per_layer)


@register("gather_blocks", changes="out")
def _gather(
    planes: list[Tensor], block_ids: Tensor, out: Tensor, layout: str, per_layer: int
) -> None:
    gather_blocks(bound(planes, layout, per_layer), block_ids, out)


@register("scatter_blocks", changes="planes")
def _scatter(
    src: Tensor, planes: list[Tensor], block_ids: Tensor, layout: str, per_layer: int
) -> None:
    scatter_blocks(src, bound(planes, layout, per_layer), block_ids)


@register("copy_blocks", changes="targets")
def _copy(
    sources: list[Tensor],
    targets: list[Tensor],
    block_mapping: Tensor,
    num_tokens: Tensor | None,
    layout: str,
    per_layer: int,
) -> None:
    source, target = bound(sources, layout, per_layer), bound(targets, layout, per_layer)
    copy_blocks(source, target, block_mapping, num_tokens)


@register("move_blocks", changes="planes")
def _move(
    planes: list[Tensor],
    block_mapping: Tensor,
    num_tokens: Tensor | None,
    layout: str,
    per_layer: int,
) -> None:
    kv = bound(planes, layout, per_layer)
    copy_blocks(kv, kv, block_mapping, num_tokens)
