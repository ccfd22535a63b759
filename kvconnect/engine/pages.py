"""One layer's keys and values in the pages of the pool: written by slot, read by page."""

from __future__ import annotations

import torch
from torch import Tensor

from kvconnect.errors import ConfigurationError
from kvconnect.layout import KvCacheLayout

__all__ = ["LayerPages"]


class LayerPages:
    """A layer's KV memory, as `BaseKVCacheManager.get_buffers` gives it.

    Args:
        buffers: a view ``[num_blocks, 2, T, num_kv_heads, head_dim]``, or where the dimensions of
            keys and values differ, two views ``[num_blocks, T, num_kv_heads, dim]``.
        layout: what they must look like.
        num_blocks: the same.

    Raises:
        ConfigurationError: they do not.
    """

    __slots__ = ("_key_rows", "_value_rows", "keys", "values")

    def __init__(
        self, buffers: Tensor | tuple[Tensor, Tensor], layout: KvCacheLayout, num_blocks: int
    ) -> None:
        keys, values = buffers if isinstance(buffers, tuple) else buffers.unbind(1)
        for name, view, dim in (
            ("keys", keys, layout.key_dim),
            ("values", values, layout.value_dim),
        ):
            shape = (num_blocks, layout.tokens_per_block, layout.num_kv_heads, dim)
            if tuple(view.shape) != shape or view.dtype != layout.dtype:
                raise ConfigurationError(
                    f"get_buffers: {name} are {view.dtype} {tuple(view.shape)}; "
                    f"{layout.dtype} {shape} is needed"
                )
        self.keys = keys
        self.values = values
        self._key_rows = _rows(keys)
        self._value_rows = _rows(values)

    def write(self, blocks: Tensor, offsets: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put token i's ``keys[i]`` and ``values[i]`` (``[tokens, heads, dim]``) at its slot."""
        self.keys[blocks, offsets] = keys
        self.values[blocks, offsets] = values

    def blank(self, blocks: Tensor, offsets: Tensor) -> None:
        """Zero these slots."""
        self.keys[blocks, offsets] = 0
        self.values[blocks, offsets] = 0

    def gather(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of `pages`, one after the other: ``[len(pages) * T, heads, dim]`` each."""
        keys = _gather(self.keys, self._key_rows, pages)
        return keys, _gather(self.values, self._value_rows, pages)


def _rows(view: Tensor) -> tuple[Tensor, int] | None:
    """The memory of `view` as rows of one page each, and how many rows lie between two pages.

    Selecting rows of a matrix is one memcpy a row; selecting from a strided view is several times
    slower. ``None`` where pages do not lie at whole multiples of their size.
    """
    elements = view[0].numel()
    step, remainder = divmod(view.stride(0), elements)
    if remainder or step == 0 or not view[0].is_contiguous():
        return None
    return view.as_strided((step * (view.shape[0] - 1) + 1, elements), (elements, 1)), step


def _gather(view: Tensor, rows: tuple[Tensor, int] | None, pages: Tensor) -> Tensor:
    shape = (pages.numel() * view.shape[1], *view.shape[2:])
    if rows is None:
        return view[pages].view(shape)
    matrix, step = rows
    return torch.index_select(matrix, 0, pages * step if step != 1 else pages).view(shape)
