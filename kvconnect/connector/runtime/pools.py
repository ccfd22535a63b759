"""The cache manager that a connector is attached to, and its pools."""

from __future__ import annotations

from collections.abc import Sequence

from kvconnect.cache.resource_manager import BaseKVCacheManager
from kvconnect.connector.data import KvCachePool, KvCachePools, LlmArgs
from kvconnect.errors import ConfigurationError
from kvconnect.layout import KvCacheLayout

__all__ = ["check_attachable", "checked_pools"]


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


def checked_pools(kv: BaseKVCacheManager, layouts: Sequence[KvCacheLayout]) -> KvCachePools:
    """Returns the pool of each group; the tensors are those of `kv`, not copies.

    Raises:
        ConfigurationError: a tensor has not the shape or dtype of its layout.
    """
    return KvCachePools(_checked_pool(kv, group, layout) for group, layout in enumerate(layouts))


def _checked_pool(kv: BaseKVCacheManager, group: int, layout: KvCacheLayout) -> KvCachePool:
    tensor = kv.pool_tensor(group) if group else kv.pool_tensor()
    if tensor.shape != layout.flat_shape(len(tensor)) or tensor.dtype != layout.dtype:
        raise ConfigurationError(
            f"pool group {group}: {type(kv).__name__} has {tensor.dtype} "
            f"{tuple(tensor.shape)}, the layout says {layout.dtype} "
            f"{layout.flat_shape(len(tensor))}"
        )
    return KvCachePool(layout, tensor)
