"""The memory of pools: on the device, in the host tier, and arenas that pools share.

A pool is a flat view ``[num_blocks, num_layers, kv_factor, elements]`` in each of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvconnect.errors import ConfigurationError
from kvconnect.kernels.pinned import host_bytes, page_lock
from kvconnect.layout import KvCacheLayout


def allocate_pool(layout: KvCacheLayout, num_blocks: int, device: torch.device) -> Tensor:
    """Allocates a zeroed pool, ``[num_blocks, num_layers, kv_factor, elements]``.

    On the CPU its address is a multiple of 4 KiB, and each page is allocated by its first write.
    """
    return pool_view(allocate_arena(num_blocks * layout.block_nbytes, device), layout)


def allocate_host_pool(layout: KvCacheLayout, num_blocks: int, device: torch.device) -> Tensor:
    """Allocates a zeroed host pool for a pool on `device`, shaped as by `allocate_pool`.

    Its address is a multiple of 4 KiB. For a CUDA `device` it is page-locked, which blocks for
    seconds per 10 GiB. Otherwise each page is allocated by its first write.

    Raises:
        ConfigurationError: the memory cannot be reserved or page-locked.
    """
    nbytes = num_blocks * layout.block_nbytes
    try:
        memory = host_bytes(nbytes)
        if device.type == "cuda":
            page_lock(memory)
    except (MemoryError, RuntimeError) as error:
        raise ConfigurationError(
            f"host_cache_size: {nbytes} bytes of host memory cannot be had ({error}); give less, "
            "or raise the limit of locked memory (ulimit -l)"
        ) from error
    return pool_view(torch.from_numpy(memory), layout)


def allocate_arena(nbytes: int, device: torch.device) -> Tensor:
    """Allocates zeroed memory that several pools share: 1-D uint8; see `pool_view`.

    On the CPU its address is a multiple of 4 KiB, and each page is allocated by its first write.
    """
    # Zeros, since masked attention multiplies the slots beyond the last token by zero, and NaN
    # times zero is NaN.
    if device.type != "cpu":
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    return torch.from_numpy(host_bytes(nbytes))


def pool_view(arena: Tensor, layout: KvCacheLayout) -> Tensor:
    """Returns a view of all of `arena` as ``[num_blocks, num_layers, kv_factor, elements]``.

    Views of one arena in several layouts share all bytes: block ``i`` is the bytes from
    ``i * block_nbytes`` on. The caller decides which layout uses which bytes.

    Raises:
        ConfigurationError: `arena` is not a whole number of blocks.
    """
    num_blocks, rest = divmod(arena.numel(), layout.block_nbytes)
    if rest:
        raise ConfigurationError(
            f"arena: {arena.numel()} bytes are no multiple of a block's {layout.block_nbytes}"
        )
    return arena.view(layout.dtype).view(layout.flat_shape(num_blocks))


def layer_buffers(
    pool: Tensor, layout: KvCacheLayout, layer_idx: int
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns a view of one layer of `pool`, ``[num_blocks, 2, T, num_kv_heads, head_dim]``.

    If key and value dimensions differ, it returns two views ``[num_blocks, T, num_kv_heads, dim]``,
    keys and values. `layer_idx` counts the layers of this pool from 0.
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


def state_buffers(pool: Tensor, layout: KvCacheLayout, layer_idx: int) -> dict[str, Tensor]:
    """Returns views of the state tensors of one layer of `pool`, each ``[num_blocks, *shape]``.

    `layer_idx` counts the layers of this pool from 0.
    """
    bytes_of_layer = pool[:, layer_idx, 0]
    return {
        one.name: bytes_of_layer[:, at : at + one.nbytes]
        .view(one.dtype)
        .view(len(pool), *one.shape)
        for one, at in layout.state_offsets(layout.layer_numbers[layer_idx])
    }
