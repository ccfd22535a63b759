"""The keys and values of one layer in the pages of the pool: written by slot, read by page."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvconnect.errors import ConfigurationError, UsageError
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.kernels.update import reshape_and_cache
from kvconnect.layout import KvCacheLayout


class PageNumbers:
    """The pages to be gathered from every layer of a pool group.

    Attributes:
        pages: int64, of the pool's device.
    """

    __slots__ = ("_pairs", "pages")

    def __init__(self, pages: Tensor) -> None:
        self.pages = pages
        self._pairs: dict[int, Tensor] = {}

    def pairs(self, step: int) -> Tensor:
        """Returns the row numbers of all keys, then of all values, if they alternate in memory.

        Args:
            step: rows from one page to the next.
        """
        if (rows := self._pairs.get(step)) is None:
            keys = self.pages * step
            rows = self._pairs[step] = torch.cat((keys, keys + 1))
        return rows


class SlotNumbers:
    """The slots to be written in every layer of a pool group: block times T plus offset.

    Attributes:
        slots: int64, of the pool's device.

    Raises:
        UsageError: a slot is given twice.
    """

    __slots__ = ("_rows", "slots")

    def __init__(self, slots: npt.NDArray[np.int64], device: torch.device) -> None:
        found, counts = np.unique(slots, return_counts=True)
        if len(found) < len(slots):
            raise UsageError(
                f"slots {found[counts > 1].tolist()} of the KV cache are to be written by several "
                "tokens of one step: the cache manager gave a block to several requests"
            )
        self.slots = torch.from_numpy(slots).to(device)
        self._rows: dict[tuple[int, int], Tensor] = {}

    def rows(self, tokens: int, step: int) -> Tensor:
        """Returns the row number of each slot, if memory has a row for each token; made once.

        Args:
            tokens: T, of a block.
            step: rows from one block to the next.
        """
        if (rows := self._rows.get((tokens, step))) is None:
            rows = self.slots // tokens * step + self.slots % tokens
            self._rows[tokens, step] = rows
        return rows


class LayerPages:
    """The KV memory of a layer, as `BaseKVCacheManager.get_buffers` returns it.

    Where the pool has another dtype than the model computes in (fp8), values are rounded when they
    are written, those beyond its range to its largest one, and converted when they are read.

    Args:
        buffers: a view ``[num_blocks, 2, T, num_kv_heads, head_dim]``, or where the dimensions of
            keys and values differ, two views ``[num_blocks, T, num_kv_heads, dim]``. Latents have
            no values: reading values returns the keys.
        layout: the required layout of `buffers`.
        num_blocks: the required number of blocks; ``None``: any.
        dtype: the dtype that the model computes in; ``None``: the layout's.

    Raises:
        ConfigurationError: `buffers` do not fit.
    """

    __slots__ = (
        "_dtype",
        "_key_memory",
        "_kv",
        "_pairs",
        "_stored",
        "_value_memory",
        "keys",
        "values",
    )

    def __init__(
        self,
        buffers: Tensor | tuple[Tensor, Tensor],
        layout: KvCacheLayout,
        num_blocks: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        keys, values = buffers if isinstance(buffers, tuple) else buffers.unbind(1)
        for name, view, dim in (
            ("keys", keys, layout.key_dim),
            ("values", values, layout.value_dim),
        ):
            count = len(keys) if num_blocks is None else num_blocks
            shape = (count, layout.tokens_per_block, layout.num_kv_heads, dim)
            if tuple(view.shape) != shape or view.dtype != layout.dtype:
                raise ConfigurationError(
                    f"get_buffers: {name} are {view.dtype} {tuple(view.shape)}; "
                    f"{layout.dtype} {shape} is needed"
                )
        self.keys = keys
        self.values = values
        self._stored = layout.dtype
        self._dtype = dtype or layout.dtype
        planes = [keys, values] if layout.value_dim else [keys]
        self._kv = PagedKv.from_views(planes, per_layer=len(planes))
        self._key_memory = _Memory(keys)
        self._value_memory = _Memory(values) if layout.value_dim else None
        self._pairs = None if isinstance(buffers, tuple) else _pairs(buffers)

    def as_stored(self, states: Tensor) -> Tensor:
        """Returns keys or values as they read back after a write, in the model's dtype."""
        if self._stored == self._dtype:
            return states
        return self._rounded(states).to(self._dtype)

    def write(self, numbers: SlotNumbers, keys: Tensor, values: Tensor) -> None:
        """Writes token i's ``keys[i]`` and ``values[i]`` (``[tokens, heads, dim]``) at its slot."""
        keys, values = self._rounded(keys), self._rounded(values)
        memory = self._value_memory
        if self._key_memory.put(numbers, keys) and (memory is None or memory.put(numbers, values)):
            return
        given = None if memory is None else values
        reshape_and_cache(keys, given, self._kv, numbers.slots, layer=0)

    def blank(self, blocks: Tensor, offsets: Tensor) -> None:
        """Zeroes the slots at `offsets` of `blocks`."""
        self._key_memory.view[blocks, offsets] = 0
        if self._value_memory is not None:
            self._value_memory.view[blocks, offsets] = 0

    def gather(self, numbers: PageNumbers) -> tuple[Tensor, Tensor]:
        """Returns copies of pages in a row: ``[number of pages * T, heads, dim]`` each."""
        if self._pairs is not None:
            matrix, step = self._pairs
            rows = torch.index_select(matrix, 0, numbers.pairs(step))
            keys, values = rows.view(self._stored).view(2, -1, *self.keys.shape[2:]).unbind()
        else:
            keys = self._key_memory.gather(numbers.pages)
            memory = self._value_memory
            values = keys if memory is None else memory.gather(numbers.pages)
        return self._converted(keys, values)

    def at(self, blocks: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns copies of single tokens: ``[…, heads, dim]`` for indices of any shape ``[…]``."""
        keys = self._key_memory.at(blocks, offsets)
        memory = self._value_memory
        return self._converted(keys, keys if memory is None else memory.at(blocks, offsets))

    def _converted(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self._stored == self._dtype:
            return keys, values
        converted = keys.to(self._dtype)
        return converted, converted if values is keys else values.to(self._dtype)

    def _rounded(self, states: Tensor) -> Tensor:
        if self._stored == self._dtype:
            return states
        limit = torch.finfo(self._stored).max  # beyond it fp8 knows no infinity, only NaN
        return states.clamp(-limit, limit).to(self._stored)


class _Memory:
    """The keys, or the values, of one layer.

    Attributes:
        view: ``[num_blocks, T, heads, dim]``; bytes where torch indexes no such dtype.
    """

    __slots__ = ("_dtype", "_rows", "_tokens", "view")

    def __init__(self, memory: Tensor) -> None:
        self._dtype = memory.dtype
        # Few operations exist for types of one byte; for indexing, bytes are bytes.
        self.view = memory.view(torch.uint8) if memory.dtype.itemsize == 1 else memory
        self._rows = _rows(self.view)
        self._tokens = _token_rows(self.view)

    def put(self, numbers: SlotNumbers, states: Tensor) -> bool:
        """Writes ``states[i]`` at slot i, if tokens lie in rows of memory of the host."""
        if self._tokens is None:
            return False
        matrix, step = self._tokens
        rows = states.view(self.view.dtype).reshape(len(states), -1)
        matrix.index_copy_(0, numbers.rows(self.view.shape[1], step), rows)
        return True

    def at(self, blocks: Tensor, offsets: Tensor) -> Tensor:
        if self._tokens is None:
            return self.view[blocks, offsets].view(self._dtype)
        matrix, step = self._tokens
        picked = torch.index_select(matrix, 0, (blocks * step + offsets).flatten())
        return picked.view(*blocks.shape, *self.view.shape[2:]).view(self._dtype)

    def gather(self, pages: Tensor) -> Tensor:
        view = self.view
        shape = (pages.numel() * view.shape[1], *view.shape[2:])
        if self._rows is None:
            return view[pages].view(shape).view(self._dtype)
        matrix, step = self._rows
        picked = torch.index_select(matrix, 0, pages * step if step != 1 else pages)
        return picked.view(shape).view(self._dtype)


def _pairs(buffers: Tensor) -> tuple[Tensor, int] | None:
    """Returns rows like `_rows`, alternating keys and values, so that one selection gets both."""
    whole = buffers.view(torch.uint8) if buffers.dtype.itemsize == 1 else buffers
    found = _rows(whole)
    if found is None:
        return None
    elements, step = whole[0, 0].numel(), 2 * found[1]
    return whole.as_strided((step * (len(whole) - 1) + 2, elements), (elements, 1)), step


def _rows(view: Tensor) -> tuple[Tensor, int] | None:
    """Returns the memory of `view` as rows of one page's size, and the row distance of two pages.

    Selecting rows of a matrix is one memcpy a row; selecting from a strided view is several times
    slower. Returns ``None`` if the distance of pages is no multiple of their size.
    """
    elements = view[0].numel()
    step, remainder = divmod(view.stride(0), elements)
    if remainder or step == 0 or not view[0].is_contiguous():
        return None
    return view.as_strided((step * (view.shape[0] - 1) + 1, elements), (elements, 1)), step


def _token_rows(view: Tensor) -> tuple[Tensor, int] | None:
    """Returns the memory as a row for each token; ``None`` on devices, which have a kernel."""
    _, tokens, heads, dim = view.shape
    elements = heads * dim
    if _rows(view) is None or view.device.type != "cpu" or view.stride(0) % elements:
        return None
    step = view.stride(0) // elements
    return view.as_strided((step * (len(view) - 1) + tokens, elements), (elements, 1)), step
