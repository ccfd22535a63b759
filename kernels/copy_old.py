"""Copies of blocks between pools and host memory, and within a pool.

A pool is ``[num_blocks, num_layers, kv_factor, elements]``, as `KvCacheLayout.flat_shape` says. One
block is one contiguous run of bytes, and so is one layer of it; every function here is a few
contiguous copies at memcpy speed. On CUDA they run on the current stream; copies between the device
and pinned memory do not wait for it, so the host buffer belongs to the copy until the stream got
there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvconnect.errors import ConfigurationError
from kvconnect.layout import KvCacheLayout

__all__ = ["block_rows", "copy_blocks", "copy_in", "copy_out", "copy_tokens"]


def copy_out(pool: Tensor, block_id: int, out: Tensor) -> None:
    """Write block `block_id` of `pool` to `out`.

    Args:
        pool: ``[num_blocks, num_layers, kv_factor, elements]``, contiguous.
        block_id: 0 <= block_id < num_blocks.
        out: one-dimensional uint8 host tensor of just the block's bytes; the only thing changed.

    Raises:
        ConfigurationError: (a ``ValueError``) shape or dtype of `out` is wrong; nothing was
            written.
        IndexError: there is no such block; nothing was written.
    """
    block = _block(pool, block_id)
    _check_bytes("out", out, block)
    out.copy_(_as_bytes(block), non_blocking=_may_overlap(pool, out))


def copy_in(src: Tensor, pool: Tensor, block_id: int, layers: range | None = None) -> None:
    """Write `src` to block `block_id` of `pool`: the mirror of `copy_out`.

    Args:
        src: one-dimensional uint8 host tensor of just a block's bytes, whatever `layers` is.
        pool: ``[num_blocks, num_layers, kv_factor, elements]``, contiguous; that block is changed.
        block_id: 0 <= block_id < num_blocks.
        layers: consecutive layers to write, and no others; ``None``: all.

    Raises:
        ConfigurationError: (a ``ValueError``) `src` or `layers` is wrong; nothing was written.
        IndexError: there is no such block; nothing was written.
    """
    block = _block(pool, block_id)
    _check_bytes("src", src, block)
    overlap = _may_overlap(pool, src)
    if layers is None:
        _as_bytes(block).copy_(src, non_blocking=overlap)
        return
    num_layers = block.shape[0]
    if layers.step != 1 or not 0 <= layers.start <= layers.stop <= num_layers:
        raise ConfigurationError(
            f"layers: {layers} must be a range of step 1 within 0..{num_layers}"
        )
    if not layers:
        return
    layer_nbytes = block.nbytes // num_layers
    part = src[layers.start * layer_nbytes : layers.stop * layer_nbytes]
    _as_bytes(block[layers.start : layers.stop]).copy_(part, non_blocking=overlap)


def block_rows(pool: Tensor) -> Tensor:
    """The same memory as ``[num_blocks, block_nbytes]`` bytes, whatever the dtype."""
    return pool.flatten(1).view(torch.uint8)


def copy_blocks(
    source: Tensor, source_ids: Sequence[int], target: Tensor, target_ids: Sequence[int]
) -> None:
    """Copy whole blocks: ``source_ids[i]`` of `source` to ``target_ids[i]`` of `target`.

    Blocks that follow each other in both are copied as one run.

    Args:
        source: uint8 ``[num_blocks, block_nbytes]``, see `block_rows`. Host memory is page-locked
            where the other side is a CUDA device.
        source_ids: blocks to read.
        target: uint8 rows of the same length; may be `source`. Those blocks are changed.
        target_ids: as many other blocks, all distinct.

    Raises:
        ConfigurationError: (a ``ValueError``) rows of different length, as many sources as targets
            are not given, a target is given twice, or is a source, too; nothing was written.
        IndexError: there is no such block; nothing was written.
    """
    _check_blocks(source, source_ids, target, target_ids)
    # NumPy's row copies cost a third of torch's where rows are small, and let other threads run.
    on_cpu = source.device.type == target.device.type == "cpu"
    if on_cpu:
        from_rows, to_rows = source.numpy(), target.numpy()
        for start, first, length in _runs(source_ids, target_ids):
            to_rows[first : first + length] = from_rows[start : start + length]
        return
    for start, first, length in _runs(source_ids, target_ids):
        rows = source[start : start + length]
        target[first : first + length].copy_(rows, non_blocking=True)


def copy_tokens(
    pool: Tensor,
    layout: KvCacheLayout,
    source: int,
    target: int,
    num_tokens: int,
    *,
    source_pool: Tensor | None = None,
) -> None:
    """Copy the first `num_tokens` tokens of block `source` to block `target`, in all layers.

    Args:
        pool: ``[num_blocks, num_layers, kv_factor, elements]`` of `layout`; `target` is changed,
            the slots of its other tokens are left as they are.
        layout: of `pool`.
        source: block to read.
        target: another block.
        num_tokens: 0..tokens_per_block.
        source_pool: where `source` lies, in the same layout; ``None``: in `pool`. Host memory is
            page-locked where `pool` is on a CUDA device.

    Raises:
        ConfigurationError: (a ``ValueError``) `num_tokens` is out of range, or both blocks are the
            same; nothing was written.
        IndexError: there is no such block; nothing was written.
    """
    if not 0 <= num_tokens <= layout.tokens_per_block:
        raise ConfigurationError(
            f"num_tokens: {num_tokens} is outside 0..{layout.tokens_per_block}"
        )
    if source_pool is None:
        source_pool = pool
    if source == target and source_pool is pool:
        raise ConfigurationError(f"target: block {target} is the source, too")
    from_block, to_block = _block(source_pool, source), _block(pool, target)
    if from_block.device != to_block.device:
        # In one piece: torch would gather the parts of a strided copy on the host, at once.
        from_block = from_block.to(to_block.device, non_blocking=True)
    from_planes, to_planes = from_block.view(torch.uint8), to_block.view(torch.uint8)
    # In every plane the tokens come first, so a prefix of tokens is a prefix of the plane.
    token_nbytes = layout.num_kv_heads * layout.dtype.itemsize
    keys = num_tokens * token_nbytes * layout.key_dim
    to_planes[:, :, :keys].copy_(from_planes[:, :, :keys])
    if layout.kv_factor == 1 and layout.value_dim:
        low = layout.tokens_per_block * token_nbytes * layout.key_dim
        high = low + num_tokens * token_nbytes * layout.value_dim
        to_planes[:, :, low:high].copy_(from_planes[:, :, low:high])


def _check_blocks(
    source: Tensor, source_ids: Sequence[int], target: Tensor, target_ids: Sequence[int]
) -> None:
    if source.shape[1] != target.shape[1]:
        raise ConfigurationError(
            f"target: its blocks have {target.shape[1]} bytes, those of the source "
            f"{source.shape[1]}"
        )
    if len(source_ids) != len(target_ids):
        raise ConfigurationError(
            f"target_ids: {len(target_ids)} blocks for {len(source_ids)} sources"
        )
    for rows, ids in ((source, source_ids), (target, target_ids)):
        if len(ids):
            _check_id(rows, min(ids))
            _check_id(rows, max(ids))
    targets = set(target_ids)
    if len(targets) != len(target_ids):
        raise ConfigurationError("target_ids: a block is given twice")
    if source is target and not targets.isdisjoint(source_ids):
        raise ConfigurationError("target_ids: a block is a source, too")


def _runs(source_ids: Sequence[int], target_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    # (first source, first target, number of blocks) of blocks that follow each other in both.
    length, next_source, next_target = 0, -1, -1
    for source, target in zip(source_ids, target_ids, strict=True):
        if source != next_source or target != next_target:
            if length:
                yield next_source - length, next_target - length, length
            length = 0
        length, next_source, next_target = length + 1, source + 1, target + 1
    if length:
        yield next_source - length, next_target - length, length


def _check_id(pool: Tensor, block_id: int) -> None:
    if not 0 <= block_id < pool.shape[0]:
        raise IndexError(f"block {block_id} is outside 0..{pool.shape[0] - 1}")


def _block(pool: Tensor, block_id: int) -> Tensor:
    _check_id(pool, block_id)
    return pool[block_id]


def _as_bytes(block: Tensor) -> Tensor:
    return block.view(-1).view(torch.uint8)


def _check_bytes(name: str, buffer: Tensor, block: Tensor) -> None:
    if buffer.dtype != torch.uint8 or buffer.ndim != 1 or buffer.numel() != block.nbytes:
        raise ConfigurationError(
            f"{name}: a one-dimensional uint8 tensor of {block.nbytes} bytes is needed, this is "
            f"{buffer.dtype} {tuple(buffer.shape)}"
        )


def _may_overlap(pool: Tensor, host: Tensor) -> bool:
    return pool.is_cuda and host.is_pinned()
