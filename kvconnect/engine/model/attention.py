"""Computes attention over a paged KV cache: chunks of a prompt, and batches of single tokens.

Both gather the pages they need and call torch's fused attention. Grouped queries are handled by
views: the heads that share a KV head become a dimension of their own, nothing is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvconnect.engine.model.pages import LayerPages, PageNumbers
from kvconnect.errors import UsageError

__all__ = ["AttentionInput", "BlockTable", "Chunk", "DecodeGroup", "held_blocks"]

BlockTable: TypeAlias = npt.NDArray[np.int64]
"""Block ids of one request in one pool group, in order of its tokens; -1: not held."""

_MAX_MASK = 1 << 24
"""Elements of a chunk's masks; longer chunks are computed in parts."""

_TILE = 512
"""Queries that share a mask on the CPU: none of them looks at keys behind the last of them."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001  no other name
"""The kernel of `scaled_dot_product_attention` on the CPU; it also returns sums of exponentials."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionInput:
    """The inputs of one layer's attention, of all tokens of the packed row.

    Attributes:
        query: ``[1, heads, tokens, dim]``; fewer tokens where not all are attended from.
        key: ``[1, kv_heads, tokens, dim]``.
        value: ``[1, kv_heads, tokens, value_dim]``.
        scaling: of the scores.
        window: how many tokens each one sees, itself included; ``None``: all.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float | None
    window: int | None


def held_blocks(table: BlockTable, first: int, stop: int) -> BlockTable:
    """Returns the blocks ``first..stop`` of `table`, all of which must be held.

    Raises:
        UsageError: one is not: the cache manager gave up, or never gave, what this step needs.
    """
    blocks = table[first:stop]
    if len(blocks) < stop - first or (len(blocks) and blocks.min() < 0):
        raise UsageError(
            f"blocks {first} to {stop - 1} of a request are read or written in this step, and its "
            f"table of {len(table)} says {blocks.tolist()}: the cache manager does not hold them"
        )
    return blocks


@dataclass(frozen=True, slots=True, eq=False)
class _Span:
    """The keys that some queries see: their pages, their tokens in these, their mask.

    Attributes:
        pages: of all sequences, one after the other.
        first, last: the tokens of the gathered pages that are used.
        mask: added to the scores; ``None``: everything is seen, or `tiles` have masks.
        tiles: of the queries, where there are several.
    """

    pages: PageNumbers
    first: int
    last: int
    mask: Tensor | None = None
    tiles: tuple[_Tile, ...] = ()


class _Tile(NamedTuple):
    """A run of consecutive queries of a chunk, the keys that they see, and their mask."""

    queries: slice
    keys: slice
    mask: Tensor


@dataclass(slots=True, eq=False)
class Chunk:
    """A chunk of several consecutive tokens of one request.

    Attributes:
        rows: the rows of their queries, and of their results, in the packed row.
        keys: the rows of their keys and values.
        start: the first one's position in its sequence.
        table: block ids of the sequence.
        tokens_per_block: of the pool.
        device: of the pool.
        keep_masks: make a mask once for all layers; costs memory.
    """

    rows: slice
    keys: slice
    start: int
    table: BlockTable
    tokens_per_block: int
    device: torch.device
    keep_masks: bool = True
    _spans: dict[int | None, _Span] = field(default_factory=dict)
    _before: PageNumbers | None = None

    def tiles(self) -> Iterator[Chunk]:
        """Splits the chunk into parts that are small enough for masks of bounded size."""
        count = self.end - self.start
        size = max(1, _MAX_MASK // self.end)
        for first in range(0, count, size):
            stop = min(first + size, count)
            yield replace(
                self,
                rows=slice(self.rows.start + first, self.rows.start + stop),
                keys=slice(self.keys.start + first, self.keys.start + stop),
                start=self.start + first,
                keep_masks=count <= size,
                _spans={},
                _before=None,
            )

    @property
    def end(self) -> int:
        """The position after the last one."""
        length: int = self.rows.stop - self.rows.start
        return self.start + length

    def span(self, window: int | None, dtype: torch.dtype) -> _Span:
        """Returns the keys from the first one in the window on."""
        if span := self._spans.get(window):
            return span
        size = self.tokens_per_block
        seen = 0 if window is None else max(0, self.start - window + 1)
        first_page = seen // size
        pages = held_blocks(self.table, first_page, -(-self.end // size))
        base = first_page * size
        numbers = PageNumbers(torch.from_numpy(pages).to(self.device))
        tiles = tuple(self._mask_tiles(window, seen, dtype))
        span = _Span(numbers, seen - base, self.end - base, tiles=tiles)
        if self.keep_masks:
            self._spans[window] = span
        return span

    def attend(self, given: AttentionInput, pages: LayerPages, out: Tensor) -> None:
        """Attends from these tokens to those up to each of them; fills their rows of `out`.

        Args:
            given: of all tokens; the K/V of these is in the pool already.
            pages: the layer's memory.
            out: ``[tokens, heads, value_dim]``.
        """
        q, scaling = given.query[0, :, self.rows], given.scaling
        if self.start == 0 and (given.window is None or self.end <= given.window):
            k, v = given.key[0, :, self.keys], given.value[0, :, self.keys]
            out[self.rows] = _attended(q, k, v, None, scaling)
            return
        if given.window is None and _suits_flash(given):
            self._attend_in_two(given, pages, out)
            return
        span = self.span(given.window, given.query.dtype)
        k, v = (both[span.first : span.last].transpose(0, 1) for both in pages.gather(span.pages))
        rows = out[self.rows]
        for queries, keys, mask in span.tiles:
            rows[queries] = _attended(q[:, queries], k[:, keys], v[:, keys], mask, scaling)

    def _attend_in_two(self, given: AttentionInput, pages: LayerPages, out: Tensor) -> None:
        """Attends to the tokens before the chunk, all of which are seen, and to those of the chunk.

        Neither needs a mask, which costs as much as a third of the products. Both results are
        weighted by the sums of their exponentials, whose logarithms are known.
        """
        q, scaling = _grouped(given.query[0, :, self.rows], given.key.shape[1]), given.scaling
        own = [_shared(both[0, :, self.keys], q) for both in (given.key, given.value)]
        old = [
            _shared(both[: self.start].transpose(0, 1), q)
            for both in pages.gather(self._pages_before())
        ]
        near, near_sum = _flash(q, *own, is_causal=True, scale=scaling)
        far, far_sum = _flash(q, *old, scale=scaling)
        weight = torch.sigmoid(far_sum - near_sum)[..., None]
        merged = torch.lerp(near.to(weight.dtype), far.to(weight.dtype), weight)
        out[self.rows] = merged.flatten(0, 1).transpose(0, 1)

    def _pages_before(self) -> PageNumbers:
        if self._before is None:
            blocks = held_blocks(self.table, 0, -(-self.start // self.tokens_per_block))
            self._before = PageNumbers(torch.from_numpy(blocks).to(self.device))
        return self._before

    def _mask_tiles(self, window: int | None, seen: int, dtype: torch.dtype) -> Iterator[_Tile]:
        size = _TILE if self.device.type == "cpu" else self.end - self.start
        for first in range(self.start, self.end, size):
            end = min(first + size, self.end)
            low = 0 if window is None else max(0, first - window + 1)
            mask = _causal_mask(first, end, low, window, dtype, self.device)
            yield _Tile(
                slice(first - self.start, end - self.start), slice(low - seen, end - seen), mask
            )


@dataclass(slots=True, eq=False)
class DecodeGroup:
    """Attends from single tokens of several requests in one call.

    Attributes:
        rows: their rows in the packed row, ``[requests]`` int64.
        all_rows: these are all of it, in order.
        lengths: tokens of each sequence, this one included.
        tables: block ids of each sequence.
        tokens_per_block: of the pool.
    """

    rows: Tensor
    all_rows: bool
    lengths: Sequence[int]
    tables: Sequence[BlockTable]
    tokens_per_block: int
    _spans: dict[int | None, _Span] = field(default_factory=dict)

    def span(self, window: int | None, dtype: torch.dtype) -> _Span:
        """Returns the keys in each request's window, padded to one length; made once."""
        if window not in self._spans:
            self._spans[window] = self._make_span(window, dtype)
        return self._spans[window]

    def attend(self, given: AttentionInput, pages: LayerPages, out: Tensor) -> None:
        """Attends from each request's token to all before it and itself; see `Chunk.attend`."""
        out.index_copy_(0, self.rows, self.attended(given, pages))

    def attended(self, given: AttentionInput, pages: LayerPages) -> Tensor:
        """Returns the results of `attend` for its rows, in their order."""
        span = self.span(given.window, given.query.dtype)
        count = len(self.lengths)
        k, v = (
            both.view(count, -1, *both.shape[1:])[:, span.first : span.last].transpose(1, 2)
            for both in pages.gather(span.pages)
        )
        # The heads that share a KV head stand where queries of several positions would: they see
        # the same keys.
        q = given.query[0] if self.all_rows else given.query[0].index_select(1, self.rows)
        q = q.transpose(0, 1)
        q = q.reshape(count, k.shape[1], -1, k.shape[3])
        attended = scaled_dot_product_attention(q, k, v, attn_mask=span.mask, scale=given.scaling)
        return attended.flatten(1, 2)

    def _make_span(self, window: int | None, dtype: torch.dtype) -> _Span:
        size = self.tokens_per_block
        ends = np.array(self.lengths)
        seen = np.zeros_like(ends) if window is None else np.maximum(0, ends - window)
        first_pages = seen // size
        counts = -(-ends // size) - first_pages
        pages = np.empty((len(ends), counts.max()), np.int64)
        for row, table, first, count in zip(
            pages, self.tables, first_pages.tolist(), counts.tolist(), strict=True
        ):
            row[:count] = held_blocks(table, first, first + count)
            row[count:] = table[first]  # padding: any page of its own, whose content is finite
        first_seen, last_seen = seen - first_pages * size, ends - first_pages * size
        device = self.rows.device
        flat = PageNumbers(torch.from_numpy(pages.reshape(-1)).to(device))
        if np.ptp(first_seen) == 0 and np.ptp(last_seen) == 0:
            return _Span(flat, int(first_seen[0]), int(last_seen[0]))
        places = np.arange(pages.shape[1] * size)
        hidden = (places < first_seen[:, None]) | (places >= last_seen[:, None])
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(
            torch.from_numpy(hidden), -torch.inf
        )
        return _Span(flat, 0, len(places), mask[:, None, None].to(device))


def _attended(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    # [tokens, heads, value_dim] of [heads, tokens, dim]; without a mask the keys are the queries'.
    q = _grouped(q, k.shape[0])
    attended = scaled_dot_product_attention(
        q,
        _shared(k, q),
        _shared(v, q),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
    )
    return attended.flatten(0, 1).transpose(0, 1)


def _suits_flash(given: AttentionInput) -> bool:
    # The conditions that torch checks before it uses this kernel, and those that it does not.
    states = given.query, given.key, given.value
    return all(
        one.device.type == "cpu" and one.stride(-1) == 1 and one.shape[-1] == states[0].shape[-1]
        for one in states
    )


def _grouped(q: Tensor, kv_heads: int) -> Tensor:
    # [kv_heads, heads of each, tokens, dim] of [heads, tokens, dim].
    return q.reshape(kv_heads, -1, *q.shape[1:])


def _shared(states: Tensor, q: Tensor) -> Tensor:
    # Keys or values, [kv_heads, tokens, dim], for each of the heads of grouped queries.
    return states[:, None].expand(-1, q.shape[1], -1, -1)


def _causal_mask(
    start: int, end: int, seen: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    queries = torch.arange(start, end, device=device)[:, None]
    keys = torch.arange(seen, end, device=device)[None]
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
    return mask.masked_fill_(hidden, -torch.inf)
