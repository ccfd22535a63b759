"""The paged KV memory of any layout, described once for all copies from and to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvconnect.kernels.blocks.extents import extent
from kvconnect.kernels.blocks.layers import (
    KvLayer,
    Planes,
    check_layout,
    checked_planes,
    layer_planes,
    pool_planes,
)
from kvconnect.kernels.blocks.runs import RunTable
from kvconnect.kernels.blocks.strips import PlaneBytes
from kvconnect.layout import KvCacheLayout


class PagedKv:
    """The planes of a paged cache: one of keys and one of values for each layer.

    A plane is a view ``[num_blocks, T, heads, dim]`` (NHD) or ``[num_blocks, heads, T, dim]``
    (HND), of any strides but with contiguous rows of `dim` elements. A `PagedKv` is made once for a
    cache. It shares the memory of the given tensors and keeps them alive. Only its internal caches
    change; thread-safe.

    In a contiguous buffer a block is the planes of its layers one after the other, keys before
    values, each in the order of its view's axes. `gather_blocks` writes blocks in this form. A
    block of a contiguous pool has this form already.

    Attributes:
        views: the planes, layer by layer, keys before values; none for values of dim 0.
        per_layer: the planes of a layer: 2, or 1 without values (MLA).
        layout: ``"NHD"`` or ``"HND"``.
        num_layers, num_blocks, tokens, heads: sizes; `tokens` is T.
        key_dim, value_dim: elements of a row.
        dtype, device: the dtype and the device of all planes.
        pinned: whether the memory is page-locked host memory.
        planes: the location of each of `views`; offsets are addresses.
        memories: the storages that the planes lie in, as bytes.
        spans: the first address of the planes in each storage and the one after their last, by the
            storage's address.
        slot_arrays, tables, partners: caches of appends, copies to rows and copies to other caches.
    """

    __slots__ = (
        "__weakref__",
        "device",
        "dtype",
        "heads",
        "key_dim",
        "layout",
        "memories",
        "num_blocks",
        "num_layers",
        "partners",
        "per_layer",
        "pinned",
        "planes",
        "slot_arrays",
        "spans",
        "tables",
        "tokens",
        "value_dim",
        "views",
    )

    def __init__(self, planes: Planes, layout: str) -> None:
        views, self.per_layer = planes
        self.views = tuple(view.detach() for view in views)
        self.layout = layout
        first = self.views[0]
        self.num_layers = len(self.views) // self.per_layer
        self.num_blocks = first.shape[0]
        token, head = (1, 2) if layout == "NHD" else (2, 1)
        self.tokens, self.heads = first.shape[token], first.shape[head]
        self.key_dim = first.shape[3]
        self.value_dim = self.views[1].shape[3] if self.per_layer == 2 else 0
        self.dtype, self.device = first.dtype, first.device
        self.pinned = first.device.type == "cpu" and torch.cuda.is_available() and first.is_pinned()
        size = first.element_size()
        self.memories, numbers = _memories(self.views)
        self.planes = tuple(
            PlaneBytes(
                offset=view.data_ptr(),
                block=view.stride(0) * size,
                token=view.stride(token) * size,
                head=view.stride(head) * size,
                row=view.shape[3] * size,
                memory=memory,
            )
            for view, memory in zip(self.views, numbers, strict=True)
        )
        self.spans = _spans(self.views)
        self.slot_arrays: dict[int, list[npt.NDArray[np.void]]] = {}
        self.tables: dict[tuple[object, ...], RunTable] = {}
        self.partners: WeakKeyDictionary[PagedKv, Any] = WeakKeyDictionary()
        _LIVE[_geometry(self.views, layout, self.per_layer)] = self

    @staticmethod
    def from_pool(pool: Tensor, layout: KvCacheLayout | None = None) -> PagedKv:
        """Returns the cache in a pool tensor.

        Args:
            pool: ``[num_blocks, num_layers, 2, T, heads, head_dim]``; or with its `layout` the flat
                view ``[num_blocks, num_layers, kv_factor, elements]``, whose keys and values may
                differ in dim. The last axis is contiguous, the others need not be.
            layout: the layout of the pool.

        Raises:
            TypeError: the dtype is not the layout's, or `pool` is no tensor.
            ValueError: shape or strides do not fit.
        """
        return PagedKv(pool_planes(pool, layout), "NHD")

    @staticmethod
    def from_layers(layers: Sequence[KvLayer], *, layout: str = "NHD") -> PagedKv:
        """Returns the cache that consists of one tensor, or one pair, per layer.

        Args:
            layers: ``[2, num_blocks, T, heads, dim]``, ``[num_blocks, 2, T, heads, dim]``, pairs of
                keys and values ``[num_blocks, T, heads, dim]`` whose dims may differ, or a latent
                MLA cache ``[num_blocks, T, dim]``. With HND the axes T and heads change places.
            layout: ``"NHD"`` or ``"HND"``.

        Raises:
            TypeError: dtypes differ, or an element is no tensor.
            ValueError: shapes or strides do not fit, or differ; or a shape ``[2, 2, ...]``, which
                is ambiguous.
            RuntimeError: layers are on different devices.
        """
        return PagedKv(layer_planes(layers, layout), layout)

    @staticmethod
    def from_views(views: Sequence[Tensor], *, layout: str = "NHD", per_layer: int = 1) -> PagedKv:
        """Returns the cache with the planes `views`. Raises as `from_layers` does."""
        check_layout("layout", layout)
        if not views or len(views) % per_layer:
            raise ValueError(f"views: {len(views)}; a multiple of {per_layer} is needed")
        return PagedKv(checked_planes(views, per_layer, "views"), layout)

    @property
    def block_nbytes(self) -> int:
        """The bytes of a block in a contiguous buffer, all layers."""
        return self.layers_nbytes(self.num_layers)

    def described(self) -> str:
        """Returns `shape` in words, for messages."""
        return (
            f"{self.num_layers} layers of {self.tokens} tokens, {self.heads} heads of "
            f"{self.key_dim} and {self.value_dim}, {self.layout}"
        )

    @property
    def shape(self) -> tuple[object, ...]:
        """The values that must be equal in two caches for copies of blocks between them."""
        dims = (self.tokens, self.heads, self.key_dim, self.value_dim)
        return (self.num_layers, *dims, self.dtype, self.layout)

    def layer_views(self, layers: range) -> list[Tensor]:
        """Returns the planes of the consecutive `layers`."""
        return list(self.views[layers.start * self.per_layer : layers.stop * self.per_layer])

    def planes_of(self, layers: range) -> Sequence[PlaneBytes]:
        """Returns the locations of the planes of the consecutive `layers`."""
        return self.planes[layers.start * self.per_layer : layers.stop * self.per_layer]

    def layers_nbytes(self, num_layers: int) -> int:
        """Returns the bytes of `num_layers` layers of a block in a contiguous buffer."""
        width = (self.key_dim + self.value_dim) * self.dtype.itemsize
        return num_layers * self.tokens * self.heads * width


def _spans(views: Sequence[Tensor]) -> dict[int, tuple[int, int]]:
    spans: dict[int, tuple[int, int]] = {}
    for view in views:
        key, (low, high) = view.untyped_storage().data_ptr(), extent(view)
        known = spans.get(key, (low, high))
        spans[key] = (min(known[0], low), max(known[1], high))
    return spans


def _memories(views: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[int]]:
    """Returns the storages of `views` as 1-D bytes, and for each view its storage's index."""
    found: dict[int, int] = {}
    memories: list[Tensor] = []
    numbers = []
    for view in views:
        storage = view.untyped_storage()
        index = found.setdefault(storage.data_ptr(), len(memories))
        if index == len(memories):
            # Plain bytes, so that neither autograd nor inference mode affects copies.
            with torch.inference_mode(mode=False):
                memory = torch.empty(0, dtype=torch.uint8, device=view.device)
                memories.append(memory.set_(storage))
        numbers.append(index)
    return tuple(memories), numbers


def bound(views: Sequence[Tensor], layout: str, per_layer: int) -> PagedKv:
    """Returns a `PagedKv` of the planes `views`: a live one if there is one, else a new one."""
    known = _LIVE.get(_geometry(views, layout, per_layer))
    return known or PagedKv.from_views(views, layout=layout, per_layer=per_layer)


def _geometry(views: Sequence[Tensor], layout: str, per_layer: int) -> tuple[object, ...]:
    geometry = tuple((view.data_ptr(), view.shape, view.stride()) for view in views)
    return (layout, per_layer, views[0].dtype, geometry)


_LIVE: WeakValueDictionary[tuple[object, ...], PagedKv] = WeakValueDictionary()
"""All live `PagedKv`. They keep their memory alive, so no other cache can have their addresses."""
