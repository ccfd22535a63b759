"""Computes attention over a paged KV cache: chunks of a prompt, and batches of single tokens.

Both gather the pages they need; `scores` attends to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvconnect.engine.model.latents import KeysAndValues
from kvconnect.engine.model.pages import LayerPages, PageNumbers
from kvconnect.engine.model.scores import (
    AttentionInput,
    attended,
    attended_in_parts,
    causal_mask,
    single_attended,
)
from kvconnect.errors import UsageError

BlockTable: TypeAlias = npt.NDArray[np.int64]
"""Block ids of one request in one pool group, in order of its tokens; -1: not held."""

_MAX_MASK = 1 << 24
"""Elements of a chunk's masks; longer chunks are computed in parts."""

_TILE = 512
"""The queries that share a mask on the CPU; they attend to no key behind the last of them."""


def held_blocks(table: BlockTable, first: int, stop: int) -> BlockTable:
    """Returns the blocks ``first..stop`` of `table`, all of which must be held.

    Raises:
        UsageError: a block is not held: the cache manager freed it or never allocated it.
    """
    blocks = table[first:stop]
    if len(blocks) < stop - first or (len(blocks) and blocks.min() < 0):
        raise UsageError(
            f"blocks {first} to {stop - 1} of a request are read or written in this step, and its "
            f"table of {len(table)} says {blocks.tolist()}: the cache manager does not hold them"
        )
    return blocks


def padded_blocks(
    tables: Sequence[BlockTable], stops: BlockTable, firsts: BlockTable | int = 0
) -> BlockTable:
    """Returns the blocks ``firsts..stops`` of each of `tables`, ``[tables, most]``.

    A shorter row is filled up with its first block, whose content is finite.

    Raises:
        UsageError: see `held_blocks`.
    """
    counts = stops - firsts
    rows = np.empty((len(tables), counts.max()), np.int64)
    for row, table, count, stop in zip(rows, tables, counts.tolist(), stops.tolist(), strict=True):
        row[:count] = held_blocks(table, stop - count, stop)
        row[count:] = row[0]
    return rows


@dataclass(frozen=True, slots=True, eq=False)
class _Span:
    """The keys that some queries see: the pages, the tokens in them, and the mask.

    Attributes:
        pages: the pages of all sequences, one after the other.
        first, last: the tokens of the gathered pages that are used.
        mask: added to the scores; ``None``: everything is seen, or `tiles` have masks.
        tiles: the tiles of the queries, if there are several.
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


class _Part(NamedTuple):
    """A run of a sequence's tokens before a chunk: their pages, and how many they are."""

    pages: PageNumbers
    num_tokens: int


@dataclass(slots=True, eq=False)
class Chunk:
    """A chunk of several consecutive tokens of one request.

    Attributes:
        rows: the rows of their queries, and of their results, in the packed row.
        keys: the rows of their keys and values.
        start: the position of the first token in its sequence.
        table: block ids of the sequence.
        tokens_per_block: the tokens per block of the pool.
        device: the device of the pool.
        keep_masks: true to make a mask once for all layers, which costs memory.
    """

    rows: slice
    keys: slice
    start: int
    table: BlockTable
    tokens_per_block: int
    device: torch.device
    keep_masks: bool = True
    _spans: dict[int | None, _Span] = field(default_factory=dict)
    _before: dict[int | None, list[_Part]] = field(default_factory=dict)

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
                _before={},
            )

    @property
    def end(self) -> int:
        """The position after the last token."""
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
        """Attends from each token of the chunk to all tokens up to it; fills their rows of `out`.

        Args:
            given: the input of all tokens; the K/V of the chunk's tokens is in the pool already.
            pages: the layer's memory.
            out: ``[tokens, heads, value_dim]``.
        """
        q, rows = given.query[0, :, self.rows], out[self.rows]
        own = given.key[0, :, self.keys], given.value[0, :, self.keys]
        if (latents := given.latents) is None:
            self._attend(q, own, given, pages, rows)
        elif not self._attend_expanded(q, own[0], given, pages, rows):
            q = latents.absorbed(q)
            inner = q.new_empty(q.shape[1], q.shape[0], latents.dim)
            self._attend(q, (own[0], own[0]), given, pages, inner)
            rows.copy_(latents.values_of(inner))

    def _attend(
        self,
        q: Tensor,
        own: KeysAndValues,
        given: AttentionInput,
        pages: LayerPages,
        out: Tensor,
    ) -> None:
        if self.start == 0 and (given.window is None or self.end <= given.window):
            out.copy_(attended(q, own, None, given))
            return
        if given.window is None:
            before = (self._gathered(part, pages) for part in self._parts_before(None))
            if (done := attended_in_parts(q, own, before, given)) is not None:
                out.copy_(done)
                return
        span = self.span(given.window, q.dtype)
        k, v = (both[span.first : span.last].transpose(0, 1) for both in pages.gather(span.pages))
        for queries, keys, mask in span.tiles:
            out[queries] = attended(q[:, queries], (k[:, keys], v[:, keys]), mask, given)

    def _attend_expanded(
        self, q: Tensor, own: Tensor, given: AttentionInput, pages: LayerPages, out: Tensor
    ) -> bool:
        """Attends with expanded keys and values of all heads, if that is possible and faster."""
        latents = given.latents
        if latents is None or given.window is not None:
            return False
        if not latents.pays_to_expand(self.end - self.start, self.end):
            return False
        if self.start == 0:
            out.copy_(attended(q, latents.expanded(own), None, given)[..., : out.shape[-1]])
            return True
        if self.device.type != "cpu":
            return False  # all keys would be in memory at once
        before = (
            latents.expanded(self._gathered(part, pages)[0])
            for part in self._parts_before(latents.part_tokens)
        )
        done = attended_in_parts(q, latents.expanded(own), before, given)
        if done is not None:
            out.copy_(done[..., : out.shape[-1]])
        return done is not None

    def _gathered(self, part: _Part, pages: LayerPages) -> KeysAndValues:
        k, v = pages.gather(part.pages)
        return k[: part.num_tokens].transpose(0, 1), v[: part.num_tokens].transpose(0, 1)

    def _parts_before(self, size: int | None) -> list[_Part]:
        """Returns the pages of all tokens before the chunk, about `size` tokens in each part.

        With ``None`` there is one part.
        """
        if (parts := self._before.get(size)) is None:
            blocks = self.start if size is None else size // self.tokens_per_block
            step = max(1, blocks) * self.tokens_per_block
            parts = self._before[size] = [
                self._part(first, min(first + step, self.start))
                for first in range(0, self.start, step)
            ]
        return parts

    def _part(self, first: int, stop: int) -> _Part:
        size = self.tokens_per_block
        blocks = held_blocks(self.table, first // size, -(-stop // size))
        return _Part(PageNumbers(torch.from_numpy(blocks).to(self.device)), stop - first)

    def _mask_tiles(self, window: int | None, seen: int, dtype: torch.dtype) -> Iterator[_Tile]:
        size = _TILE if self.device.type == "cpu" else self.end - self.start
        for first in range(self.start, self.end, size):
            end = min(first + size, self.end)
            low = 0 if window is None else max(0, first - window + 1)
            mask = causal_mask(first, end, low, window, dtype, self.device)
            yield _Tile(
                slice(first - self.start, end - self.start), slice(low - seen, end - seen), mask
            )


@dataclass(slots=True, eq=False)
class DecodeGroup:
    """Attends from single tokens of several requests in one call.

    Attributes:
        rows: the rows of the tokens in the packed row, ``[requests]`` int64.
        all_rows: true if `rows` are all rows of the packed row, in order.
        lengths: tokens of each sequence, this one included.
        tables: block ids of each sequence.
        tokens_per_block: the tokens per block of the pool.
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
        q = given.query[0] if self.all_rows else given.query[0].index_select(1, self.rows)
        if (latents := given.latents) is None:
            return single_attended(q.transpose(0, 1), (k, v), span.mask, given)
        q = latents.absorbed(q).transpose(0, 1)
        return latents.values_of(single_attended(q, (k, v), span.mask, given))

    def _make_span(self, window: int | None, dtype: torch.dtype) -> _Span:
        size = self.tokens_per_block
        ends = np.array(self.lengths)
        seen = np.zeros_like(ends) if window is None else np.maximum(0, ends - window)
        first_pages = seen // size
        pages = padded_blocks(self.tables, -(-ends // size), first_pages)
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
