"""The host memory of SGLang as blocks of one page each, whatever its layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvconnect.connector.io.strided import StridedPlanes
from kvconnect.errors import UnsupportedModel
from kvconnect.integrations.core.memory import planes_of
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.layout import KvCacheLayout

_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


@dataclass(frozen=True, slots=True, eq=False)
class HostPool:
    """A host pool of SGLang's, of keys and values or of latents (MLA).

    Attributes:
        layout: the layout of a page, with this rank's heads and layers.
        planes: the pool's own memory.
    """

    layout: KvCacheLayout
    planes: PagedKv | StridedPlanes

    @classmethod
    def of(cls, pool: Any, *, is_mla: bool) -> HostPool:
        """Reads an ``MHATokenToKVPoolHost`` or an ``MLATokenToKVPoolHost``.

        Args:
            pool: registered by SGLang.
            is_mla: whether it holds latents.

        Raises:
            UnsupportedModel: the pool holds something else, or its shape is unexpected.
            ConfigurationError: a page has one token.
        """
        name = type(pool).__name__
        if pool.layout not in _LAYOUTS or getattr(pool, "kv_buffer", None) is None:
            raise UnsupportedModel(
                f"{name}: hicache-mem-layout {pool.layout!r} is not served; use one of "
                f"{', '.join(_LAYOUTS)}"
            )
        if getattr(pool, "target_layer_num", pool.layer_num) != pool.layer_num:
            raise UnsupportedModel(
                f"{name}: layers of a draft model are packed into its pages, and keys do not "
                "name that model"
            )
        layout = _layout(pool, is_mla=is_mla)
        planes = [_planes(pool, layer, is_mla=is_mla) for layer in range(pool.layer_num)]
        found = cls(layout, planes_of(planes, layout, pool.page_num, name=name))
        found.check_against(pool)
        return found

    def check_against(self, pool: Any) -> None:
        """Compares the planes with SGLang's description of its first and its last page.

        Raises:
            UnsupportedModel: a page holds more, or something else, than keys and values.
        """
        size, last = self.layout.tokens_per_block, pool.page_num - 1
        for page in {0, last}:
            indices = torch.arange(page * size, (page + 1) * size)
            pointers, sizes = pool.get_page_buffer_meta(indices)
            spans = [(at, at + length) for at, length in zip(pointers, sizes, strict=True)]
            inside = all(
                any(low <= plane[page].data_ptr() < high for low, high in spans)
                for plane in self.planes.views
            )
            if sum(sizes) != self.layout.block_nbytes or not inside:
                raise UnsupportedModel(
                    f"{type(pool).__name__}: SGLang moves {sum(sizes)} bytes for a page, keys and "
                    f"values of {self.layout.num_layers} layers are {self.layout.block_nbytes}: "
                    "this pool cannot be served"
                )

    def pages(self, host_indices: Tensor) -> list[int]:
        """Returns the page numbers of `host_indices`, which are token indices page by page."""
        return (
            host_indices[:: self.layout.tokens_per_block] // self.layout.tokens_per_block
        ).tolist()


def _layout(pool: Any, *, is_mla: bool) -> KvCacheLayout:
    heads, key_dim, value_dim = (
        (1, pool.kv_cache_dim, 0)
        if is_mla
        else (pool.head_num, pool.head_dim, getattr(pool, "v_head_dim", pool.head_dim))
    )
    first = pool.start_layer or 0
    return KvCacheLayout(
        num_layers=pool.layer_num,
        num_kv_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        tokens_per_block=pool.page_size,
        dtype=pool.dtype,
        layers=tuple(range(first, first + pool.layer_num)) if first else (),
    )


def _planes(pool: Any, layer: int, *, is_mla: bool) -> tuple[Tensor, Tensor] | tuple[Tensor]:
    if is_mla:
        return (_plane(pool.kv_buffer, pool, layer),)
    return (_plane(pool.k_buffer, pool, layer), _plane(pool.v_buffer, pool, layer))


def _plane(buffer: Tensor, pool: Any, layer: int) -> Tensor:
    """Returns keys or values of a layer, ``[pages, tokens, heads, dim]``."""
    by_page = (pool.page_num, pool.page_size)
    if pool.layout == "layer_first":
        return torch.unflatten(buffer[layer], 0, by_page)
    if pool.layout == "page_first":
        return torch.unflatten(buffer[:, layer], 0, by_page)
    if pool.layout == "page_first_direct":
        return buffer[:, layer]
    return buffer[:, :, :, layer].transpose(1, 2)
