"""The cache manager that a connector is attached to, and its pools."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Protocol

from torch import Tensor

from kvconnect.cache.resource_manager import BaseKVCacheManager
from kvconnect.connector.data import KvCachePool, KvCachePools, LlmArgs
from kvconnect.errors import ConfigurationError
from kvconnect.layout import KvCacheLayout


def check_attachable(llm_args: LlmArgs, kv: BaseKVCacheManager) -> None:
    """Checks that a connector can be attached to `kv`.

    Raises:
        ConfigurationError: block reuse is off, or `kv` supports no connector.
    """
    if not llm_args.kv_cache_config.enable_block_reuse:
        raise ConfigurationError(
            "enable_block_reuse=False: a connector needs block reuse; switch it on, or attach none"
        )
    if not kv.supports_connector:
        raise ConfigurationError(
            f"{type(kv).__name__} does not support connectors (supports_connector is False)"
        )


def pool_groups(layouts: Sequence[KvCacheLayout]) -> tuple[int, ...]:
    """Returns the cache's pool group of each of a connector's `layouts`.

    Several layouts of states are parts of one pool, the cache's last one.
    """
    states = [number for number, layout in enumerate(layouts) if layout.kind == "state"]
    last = min(states, default=len(layouts))
    return tuple(min(number, last) for number in range(len(layouts)))


class PoolOwner(Protocol):
    """A cache manager, or the memory of a rank that has none."""

    def pool_tensor(self, group: int = 0) -> Tensor:
        """Returns the whole pool of a group."""


def checked_pools(kv: PoolOwner, layouts: Sequence[KvCacheLayout]) -> KvCachePools:
    """Returns the pool of each group; the tensors are those of `kv`, not copies.

    Raises:
        ConfigurationError: a tensor has not the shape or dtype of its layout.
    """
    pools: list[KvCachePool] = []
    for group, same in groupby(zip(pool_groups(layouts), layouts, strict=True), itemgetter(0)):
        pools += _checked_pool(kv, group, [layout for _, layout in same])
    return KvCachePools(pools)


def _checked_pool(
    kv: PoolOwner, group: int, parts: Sequence[KvCacheLayout]
) -> Iterator[KvCachePool]:
    """Yields the `parts` of a pool, which have its layers in order."""
    tensor = kv.pool_tensor(group) if group else kv.pool_tensor()
    layout = parts[0]
    num_layers = sum(part.num_layers for part in parts)
    expected = (len(tensor), num_layers, layout.kv_factor, layout.plane_elements)
    if tensor.shape != expected or tensor.dtype != layout.dtype:
        raise ConfigurationError(
            f"pool group {group}: {type(kv).__name__} has {tensor.dtype} "
            f"{tuple(tensor.shape)}, the layout says {layout.dtype} {expected}"
        )
    if len(parts) == 1:
        yield KvCachePool(layout, tensor)  # the manager's own, not a view
        return
    first = 0
    for part in parts:
        yield KvCachePool(part, tensor[:, first : first + part.num_layers])
        first += part.num_layers
