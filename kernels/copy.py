"""Copies of single blocks between a pool and host memory, and within a pool.

A pool is ``[num_blocks, num_layers, kv_factor, elements]``, as `KvCacheLayout.flat_shape` says. One
block is one contiguous run of bytes, and so is one layer of it; every function here is a few
contiguous copies at memcpy speed. On CUDA they run on the current stream; copies between the device
and pinned memory do not wait for it, so the host buffer belongs to the copy until the stream got
there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvconnect.errors import ConfigurationError
from kvconnect.layout import KvCacheLayout

__all__ = ["copy_in", "copy_out", "copy_tokens"]


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


def copy_tokens(
    pool: Tensor, layout: KvCacheLayout, source: int, target: int, num_tokens: int
) -> None:
    """Copy the first `num_tokens` tokens of block `source` to block `target`, in all layers.

    Args:
        pool: ``[num_blocks, num_layers, kv_factor, elements]`` of `layout`; `target` is changed,
            the slots of its other tokens are left as they are.
        layout: of `pool`.
        source: block to read.
        target: another block.
        num_tokens: 0..tokens_per_block.

    Raises:
        ConfigurationError: (a ``ValueError``) `num_tokens` is out of range, or both blocks are the
            same; nothing was written.
        IndexError: there is no such block; nothing was written.
    """
    if not 0 <= num_tokens <= layout.tokens_per_block:
        raise ConfigurationError(
            f"num_tokens: {num_tokens} is outside 0..{layout.tokens_per_block}"
        )
    if source == target:
        raise ConfigurationError(f"target: block {target} is the source, too")
    from_block, to_block = _block(pool, source), _block(pool, target)
    # In every plane the tokens come first, so a prefix of tokens is a prefix of the plane.
    keys = num_tokens * layout.num_kv_heads * layout.key_dim
    to_block[:, :, :keys].copy_(from_block[:, :, :keys])
    if layout.kv_factor == 1 and layout.value_dim:
        low = layout.tokens_per_block * layout.num_kv_heads * layout.key_dim
        high = low + num_tokens * layout.num_kv_heads * layout.value_dim
        to_block[:, :, low:high].copy_(from_block[:, :, low:high])


def _block(pool: Tensor, block_id: int) -> Tensor:
    if not 0 <= block_id < pool.shape[0]:
        raise IndexError(f"block {block_id} is outside 0..{pool.shape[0] - 1}")
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
