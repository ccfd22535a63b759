"""The description of pools that TensorRT-LLM's second cache manager gives."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvconnect.errors import UnsupportedModel

__all__ = ["single_pool"]

_REMEDY = (
    "kvconnect is built for the form of one tensor (register_kv_caches); set "
    "kv_cache_config.use_kv_cache_manager_v2=False, or serve a model with one attention window"
)


def single_pool(layout: Any) -> Tensor:
    """Returns the tensor that is all of `layout`, TensorRT-LLM's ``KvCacheLayout``.

    Its form is that of `register_kv_caches`: ``[num_blocks, num_layers, kv_factor, elements]``.

    Raises:
        UnsupportedModel: there is none: several layer groups or regions, or a release whose
            description makes no tensor.
    """
    groups = tuple(layout.groups)
    regions = sum(
        len(group.regions) + len(getattr(group, "replicated_regions", ())) for group in groups
    )
    if len(groups) != 1 or regions != 1:
        raise UnsupportedModel(
            f"register_kv_cache_layout: KV in {len(groups)} layer groups and {regions} regions; "
            f"{_REMEDY}"
        )
    as_tensor = getattr(layout, "as_single_pool_tensor", None)
    pool = None if as_tensor is None else as_tensor()
    if pool is None:
        raise UnsupportedModel(
            f"register_kv_cache_layout: the pool's {type(layout).__name__} makes no tensor of it; "
            f"{_REMEDY}"
        )
    found: Tensor = pool
    return found
