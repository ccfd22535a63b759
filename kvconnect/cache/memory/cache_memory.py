"""The memory of one rank's cache."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvconnect.cache.memory.pool_tensor import (
    allocate_arena,
    allocate_host_pool,
    allocate_pool,
    layer_buffers,
    pool_view,
    state_buffers,
)
from kvconnect.cache.memory.sizing import PoolSizes
from kvconnect.errors import ConfigurationError


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
