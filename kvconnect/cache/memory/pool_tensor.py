"""The memory of pools: on the device, in the host tier, and arenas that pools share.

A pool is a flat view ``[num_blocks, num_layers, kv_factor, elements]`` in each of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvconnect.cache.memory.sizing import PoolSizes
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


class CacheMemory:
    """The pools of all pool groups, on the device and in the host tier.

    Attributes:
        pools: the device's pools by group, as of `allocate_pool`. If pools exchange memory, all of
            them are views of one arena.
        host_pools: the pools of the host tier by group, as of `allocate_host_pool`; ``None`` for a
            group without host tier.

    Raises:
        ConfigurationError: the host memory cannot be allocated or page-locked.
    """

    def __init__(self, sizes: PoolSizes, device: torch.device) -> None:
        self._layouts = sizes.layouts
        self.pools: list[Tensor]
        if sizes.slabs is None:
            counts = zip(sizes.layouts, sizes.num_blocks, strict=True)
            self.pools = [allocate_pool(layout, count, device) for layout, count in counts]
        else:
            arena = allocate_arena(sizes.slabs.nbytes * len(sizes.slabs.owners), device)
            self.pools = [pool_view(arena, layout) for layout in sizes.layouts]
        self.host_pools = [
            allocate_host_pool(layout, count, device) if count else None
            for layout, count in zip(sizes.layouts, sizes.num_host_blocks, strict=True)
        ]
        self._layers = {
            number: (group, index)
            for group, layout in enumerate(sizes.layouts)
            for index, number in enumerate(layout.layer_numbers)
        }

    def pool_tensor(self, group: int = 0) -> Tensor:
        """Returns a group's pool, contiguous ``[num_blocks, num_layers, kv_factor, elements]``."""
        return self.pools[group]

    def buffers(self, layer_idx: int) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the KV memory of a layer, as `BaseKVCacheManager.get_buffers` describes.

        Raises:
            ConfigurationError: there is no such layer.
        """
        try:
            group, index = self._layers[layer_idx]
        except KeyError:
            raise ConfigurationError(
                f"layer_idx: there is no layer {layer_idx}, only {sorted(self._layers)}"
            ) from None
        return layer_buffers(self.pools[group], self._layouts[group], index)

    def states(self, layer_idx: int) -> Mapping[str, Tensor]:
        """Returns the state tensors of a layer, as `BaseKVCacheManager.get_states` describes.

        Raises:
            ConfigurationError: the layer has no states.
        """
        group, index = self._layers.get(layer_idx, (0, 0))
        layout = self._layouts[group]
        if layer_idx not in self._layers or layout.kind != "state":
            raise ConfigurationError(f"layer_idx: layer {layer_idx} has no states")
        return state_buffers(self.pools[group], layout, index)
