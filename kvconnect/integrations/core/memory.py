"""The paged memory of an engine as planes for the pair, checked by shape and strides."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvconnect.connector.io.strided import StridedPlanes
from kvconnect.errors import ConfigurationError
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.layout import KvCacheLayout


def planes_of(
    planes: Sequence[tuple[Tensor, Tensor] | tuple[Tensor]],
    layout: KvCacheLayout,
    num_blocks: int,
    *,
    name: str,
) -> PagedKv | StridedPlanes:
    """Returns one pool's planes, as `OffloadWorker.register_planes` takes them.

    Args:
        planes: keys and values of each layer, or the latent alone, ``[num_blocks, tokens, heads,
            dim]`` of any strides: views of the engine's own memory.
        layout: the engine's description of a block.
        num_blocks: the engine's number of blocks in the pool.
        name: the engine's name of the memory, for errors.

    Raises:
        ConfigurationError: shape, dtype or strides do not fit `layout`.
    """
    if len(planes) != layout.num_layers:
        raise ConfigurationError(
            f"{name}: {len(planes)} layers; the engine describes {layout.num_layers}"
        )
    dims = (layout.key_dim, layout.value_dim) if layout.value_dim else (layout.key_dim,)
    views: list[Tensor] = []
    for number, layer in enumerate(planes):
        if len(layer) != len(dims):
            raise ConfigurationError(
                f"{name}, layer {number}: {len(layer)} planes; {len(dims)} are described"
            )
        for part, (view, dim) in enumerate(zip(layer, dims, strict=True)):
            expected = (num_blocks, layout.tokens_per_block, layout.num_kv_heads, dim)
            if tuple(view.shape) != expected or view.dtype != layout.dtype:
                raise ConfigurationError(
                    f"{name}, layer {number}, {'values' if part else 'keys'}: "
                    f"{tuple(view.shape)} of {view.dtype}; the engine describes {expected} of "
                    f"{layout.dtype}: this memory cannot be served"
                )
            views.append(view)
    if all(view.stride(3) == 1 or view.shape[3] == 1 for view in views):
        return PagedKv.from_views(views, per_layer=len(dims))
    return StridedPlanes(tuple(views), len(dims))


def split_blocks(cache: Tensor, num_blocks: int, *, name: str) -> Tensor:
    """Returns `cache` with the scheduler's blocks as first axis, if kernels use smaller ones.

    Args:
        cache: ``[num_blocks * ratio, tokens, …]``, a view.
        num_blocks: the number of the scheduler's blocks.
        name: for errors.

    Returns:
        ``[num_blocks, ratio * tokens, …]``, a view of the same memory.

    Raises:
        ConfigurationError: the tokens of a block do not lie at one distance from each other.
    """
    kernel_blocks, tokens = cache.shape[:2]
    if kernel_blocks == num_blocks:
        return cache
    ratio, rest = divmod(kernel_blocks, num_blocks)
    if rest or cache.stride(0) != tokens * cache.stride(1):
        raise ConfigurationError(
            f"{name}: {kernel_blocks} kernel blocks of {tokens} tokens for {num_blocks} blocks, "
            f"with strides {cache.stride()}: tokens of a block do not lie evenly; set the engine's "
            f"block size to {tokens}"
        )
    shape = (num_blocks, ratio * tokens, *cache.shape[2:])
    stride = (ratio * cache.stride(0), *cache.stride()[1:])
    return torch.as_strided(cache, shape, stride, cache.storage_offset())
