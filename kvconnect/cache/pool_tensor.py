"""The memory of a pool."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvconnect.layout import KvCacheLayout

__all__ = ["allocate_pool", "layer_buffers"]

_PAGE = 4096


def allocate_pool(layout: KvCacheLayout, num_blocks: int, device: torch.device) -> Tensor:
    """Zeroed memory for `num_blocks`, as ``[num_blocks, num_layers, kv_factor, elements]``.

    On the CPU it begins at a multiple of 4 KiB and takes memory page by page as it is written to.
    """
    shape = layout.flat_shape(num_blocks)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=layout.dtype, device=device)
    nbytes = num_blocks * layout.block_nbytes
    # Zeros, as masked attention multiplies what lies beyond the last token by zero: no NaN may be
    # there.
    memory = np.zeros(nbytes + _PAGE, np.uint8)
    start = -memory.ctypes.data % _PAGE
    return torch.from_numpy(memory[start : start + nbytes]).view(layout.dtype).view(shape)


def layer_buffers(
    pool: Tensor, layout: KvCacheLayout, layer_idx: int
) -> Tensor | tuple[Tensor, Tensor]:
    """Views of one layer: ``[num_blocks, 2, T, num_kv_heads, head_dim]``.

    Where key and value dimensions differ, two views ``[num_blocks, T, num_kv_heads, dim]``.
    """
    layer = pool[:, layer_idx]
    num_blocks, tokens, heads = pool.shape[0], layout.tokens_per_block, layout.num_kv_heads
    if layout.kv_factor == 2:
        return layer.view(num_blocks, 2, tokens, heads, layout.key_dim)
    plane = layer[:, 0]
    num_key_elements = tokens * heads * layout.key_dim
    keys, values = plane[:, :num_key_elements], plane[:, num_key_elements:]
    return (
        keys.view(num_blocks, tokens, heads, layout.key_dim),
        values.view(num_blocks, tokens, heads, layout.value_dim),
    )
