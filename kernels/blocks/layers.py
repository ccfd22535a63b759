"""The forms in which engines hold a paged KV cache, as planes of one shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from kvconnect.errors import ConfigurationError, nearest
from kvconnect.kernels.blocks.extents import shares_elements
from kvconnect.layout import KvCacheLayout

KvLayer: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""One layer's cache: keys and values in one tensor, or one tensor of each."""


Planes: TypeAlias = tuple[tuple[Tensor, ...], int]
"""The planes of a cache, layer by layer, keys before values, and how many a layer has: 2, or 1.

Planes are ``[num_blocks, T, heads, dim]`` or, HND, ``[num_blocks, heads, T, dim]``. Only their last
axes may differ. A layer without values has one.
"""


def checked_planes(views: Sequence[Tensor], per_layer: int, name: str) -> Planes:
    """Returns the planes that consist of `views`, after checks.

    Raises:
        TypeError: dtypes differ.
        ValueError: there are none, shapes differ, an axis but the first has length 0, a last axis
            is not contiguous, or strides make elements share memory.
        RuntimeError: views are on different devices.
    """
    if not views:
        raise ConfigurationError(f"{name}: no layers; at least one is needed")
    for number, view in enumerate(views):
        first = views[number % per_layer]
        if view.dtype != views[0].dtype:
            raise TypeError(f"{name}: both {views[0].dtype} and {view.dtype}")
        if view.device != views[0].device:
            raise RuntimeError(f"{name}: on {views[0].device} and on {view.device}")
        if view.shape != first.shape or view.shape[:3] != views[0].shape[:3]:
            raise ConfigurationError(
                f"{name}: shapes differ, {tuple(first.shape)} and {tuple(view.shape)}"
            )
        _check_strides(name, view)
    return tuple(_with_unit_rows(view) for view in views), per_layer


def check_layout(name: str, layout: str) -> None:
    """Raises ValueError unless `layout` is NHD or HND."""
    if layout not in {"NHD", "HND"}:
        raise ConfigurationError(f"{name}='{layout}': {nearest(layout, ('NHD', 'HND'))}")


def pool_planes(pool: Tensor, layout: KvCacheLayout | None) -> Planes:
    """Returns the planes of a pool. Arguments and errors are those of `PagedKv.from_pool`."""
    _check_tensor("pool", pool)
    if layout is not None:
        pool = _unfolded(pool, layout)
    if pool.ndim == 6 and pool.shape[2] == 2:
        views = [plane for layer in pool.unbind(1) for plane in layer.unbind(1)]
        return checked_planes(views, 2, "pool")
    if layout is None or pool.ndim != 4:
        raise ConfigurationError(
            f"pool: {tuple(pool.shape)} must be [num_blocks, num_layers, 2, T, heads, head_dim], "
            "or [num_blocks, num_layers, kv_factor, elements] with its layout"
        )
    size, heads = layout.tokens_per_block, layout.num_kv_heads
    keys = size * heads * layout.key_dim
    views = []
    for plane in pool[:, :, 0].unbind(1):
        views.append(torch.unflatten(plane[:, :keys], 1, (size, heads, layout.key_dim)))
        if layout.value_dim:
            views.append(torch.unflatten(plane[:, keys:], 1, (size, heads, layout.value_dim)))
    return checked_planes(views, 2 if layout.value_dim else 1, "pool")


def _unfolded(pool: Tensor, layout: KvCacheLayout) -> Tensor:
    """Returns `pool` with its last axis split into tokens, heads and dim.

    If keys and values differ in shape, `pool` itself is returned.

    Raises:
        TypeError, ValueError: dtype or shape are not those of `layout`.
    """
    if pool.dtype != layout.dtype:
        raise TypeError(f"pool: {pool.dtype}, its layout says {layout.dtype}")
    folded = layout.flat_shape(pool.shape[0] if pool.ndim else 0)
    inner = (layout.tokens_per_block, layout.num_kv_heads, layout.key_dim)
    if tuple(pool.shape) == folded:
        return torch.unflatten(pool, 3, inner) if layout.kv_factor == 2 else pool
    if layout.kv_factor == 1 or tuple(pool.shape) != (*folded[:3], *inner):
        raise ConfigurationError(f"pool: {tuple(pool.shape)}, its layout says {folded}")
    return pool


def layer_planes(layers: Sequence[KvLayer], layout: str) -> Planes:
    """Returns the planes of one cache per layer, with the errors of `PagedKv.from_layers`."""
    check_layout("layout", layout)
    if not len(layers):
        raise ConfigurationError("layers: none; at least one is needed")
    found = [_layer(f"layers[{index}]", layer, layout) for index, layer in enumerate(layers)]
    counts = {len(planes) for planes in found}
    if len(counts) > 1:
        raise ConfigurationError("layers: some have values and some have not; all must be alike")
    return checked_planes([view for planes in found for view in planes], counts.pop(), "layers")


def _layer(name: str, layer: KvLayer, layout: str) -> tuple[Tensor, ...]:
    if isinstance(layer, (tuple, list)):
        if len(layer) != 2:
            raise ConfigurationError(f"{name}: {len(layer)} tensors; a pair (K, V) is needed")
        for part, view in zip(("K", "V"), layer, strict=True):
            _check_tensor(f"{name} {part}", view)
            if view.ndim != 4:
                raise ConfigurationError(
                    f"{name} {part}: {tuple(view.shape)} must be [num_blocks, T, heads, dim]"
                )
        keys, values = layer
        return (keys, values) if values.shape[3] else (keys,)
    _check_tensor(name, layer)
    if layer.ndim == 3:
        return (layer.unsqueeze(2 if layout == "NHD" else 1),)
    axes = [axis for axis in (0, 1) if layer.ndim == 5 and layer.shape[axis] == 2]
    if len(axes) == 2:
        raise ConfigurationError(
            f"{name}: {tuple(layer.shape)} can be [2, num_blocks, ...] and [num_blocks, 2, ...]; "
            "give a pair (K, V)"
        )
    if not axes:
        raise ConfigurationError(
            f"{name}: {tuple(layer.shape)} must be [2, num_blocks, T, heads, dim], [num_blocks, 2, "
            "T, heads, dim], a pair (K, V) or [num_blocks, T, dim]"
        )
    keys, values = layer.unbind(axes[0])
    return (keys, values)


def _check_strides(name: str, view: Tensor) -> None:
    shape, strides = view.shape, view.stride()
    if any(length < 1 for length in shape[1:]):
        raise ConfigurationError(f"{name}: shape {tuple(shape)} has an axis of length 0")
    if shape[3] > 1 and strides[3] != 1:
        raise ConfigurationError(
            f"{name}: strides {strides}: the last axis must be contiguous; call contiguous() on it"
        )
    if shares_elements(view):
        raise ConfigurationError(
            f"{name}: strides {strides} of {tuple(shape)} make elements share memory"
        )


def _with_unit_rows(view: Tensor) -> Tensor:
    """Returns `view` with last stride 1, as views as bytes need. Rows of one element may differ."""
    if view.stride(3) == 1:
        return view
    return view.as_strided(view.shape, (*view.stride()[:3], 1), view.storage_offset())


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: a tensor is needed, this is {type(value).__name__}")
