"""The tokens that an index chooses: what it is called for, and attention to what it chose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvconnect.engine.model.attention import BlockTable, padded_blocks
from kvconnect.engine.model.pages import LayerPages, PageNumbers, SlotNumbers
from kvconnect.engine.model.scores import AttentionInput, single_attended
from kvconnect.engine.model.seam import IndexCall
from kvconnect.engine.model.sequence_step import RequestSlice

_MOST_KEYS = 1 << 24
"""Elements of keys that are gathered at once."""


@dataclass(frozen=True, slots=True, eq=False)
class ChosenTokens:
    """The locations of the tokens of a step's sequences, for queries that see a few of them.

    Attributes:
        sequences: the number of each query's sequence, ``[tokens, 1]`` int64.
        positions: the position of each query in its sequence, ``[tokens, 1]`` int64.
        blocks: block ids of each sequence, ``[sequences, blocks]`` int64; see `padded_blocks`.
        tokens_per_block: the tokens per block of the pool.
    """

    sequences: Tensor
    positions: Tensor
    blocks: Tensor
    tokens_per_block: int

    @classmethod
    def of(
        cls,
        starts: Sequence[int],
        ends: Sequence[int],
        tables: Sequence[BlockTable],
        tokens_per_block: int,
        device: torch.device,
    ) -> ChosenTokens:
        """Returns the locations for the tokens ``starts..ends`` of each sequence.

        Raises:
            UsageError: a sequence does not hold the blocks of all of its tokens.
        """
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        blocks = padded_blocks(tables, -(-np.array(ends) // tokens_per_block))
        positions = np.concatenate([np.arange(*one) for one in zip(starts, ends, strict=True)])
        return cls(
            torch.from_numpy(np.repeat(np.arange(len(counts)), counts)[:, None]).to(device),
            torch.from_numpy(positions[:, None]).to(device),
            torch.from_numpy(blocks).to(device),
            tokens_per_block,
        )

    def attended(self, chosen: Tensor, given: AttentionInput, pages: LayerPages) -> Tensor:
        """Returns the attention of each token, ``[tokens, heads, value_dim]``.

        Args:
            chosen: the tokens that each one attends to; see `AttentionInput.chosen`.
            given: the input of all tokens, whose K/V is in the pool already.
            pages: the layer's memory.
        """
        latents = given.latents
        q = given.query[0] if latents is None else latents.absorbed(given.query[0])
        q = q.transpose(0, 1)
        rows = max(1, _MOST_KEYS // (chosen.shape[1] * pages.keys.shape[2] * q.shape[2]))
        found = []
        for first in range(0, len(q), rows):
            part = slice(first, first + rows)
            keys, mask = self._gathered(part, chosen[part], pages, q.dtype)
            found.append(single_attended(q[part], keys, mask, given))
        out = torch.cat(found)
        return out if latents is None else latents.values_of(out)

    def _gathered(
        self, rows: slice, chosen: Tensor, pages: LayerPages, dtype: torch.dtype
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Returns the chosen keys and values of each query, and the mask of those that it sees."""
        hidden = (chosen < 0) | (chosen > self.positions[rows])
        # Instead of a hidden token the first one of the sequence is read: numbers of another
        # sequence might be none, which a mask does not hide.
        places = chosen.masked_fill(hidden, 0).to(torch.int64)
        blocks = self.blocks[self.sequences[rows], places // self.tokens_per_block]
        k, v = pages.at(blocks, places % self.tokens_per_block)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        mask.masked_fill_(hidden, -torch.inf)
        return (k.transpose(1, 2), v.transpose(1, 2)), mask[:, None, None]


_MOST_SCORES = 1 << 25
"""Elements of an index's scores that are held at once, in float32."""


@dataclass(frozen=True, slots=True, eq=False)
class IndexPart:
    """A run of consecutive tokens of one sequence, or a single token of each of several.

    Attributes:
        rows: their rows of the packed row, ``[sequences, tokens]`` int64.
        positions: their positions in their sequences, ``[sequences, tokens]`` int64.
        num_keys: the tokens of the longest sequence.
        slots: the slots of their keys.
        pages: the pages of the sequences, one after the other, equally many of each.
    """

    rows: Tensor
    positions: Tensor
    num_keys: int
    slots: SlotNumbers
    pages: PageNumbers

    @property
    def seen(self) -> Tensor:
        """The positions that each token may choose, ``[sequences, tokens, keys]`` bool."""
        return torch.arange(self.num_keys, device=self.rows.device) <= self.positions[..., None]

    def append(self, memory: LayerPages, keys: Tensor) -> Tensor:
        """Writes index keys, and returns those of the whole sequences.

        Args:
            memory: the memory of the index's keys in one layer.
            keys: the keys of the tokens, ``[sequences, tokens, dim]``.

        Returns:
            ``[sequences, keys, dim]``; what is behind the end of a sequence is undefined.
        """
        flat = keys.flatten(0, 1)[:, None]
        memory.write(self.slots, flat, flat)
        found, _ = memory.gather(self.pages)
        return found.view(len(keys), -1, keys.shape[2])[:, : self.num_keys]


def index_parts(
    slices: Sequence[RequestSlice], call: IndexCall, group: int, size: int, *, device: torch.device
) -> list[IndexPart]:
    """Returns the parts of a step, with scores of bounded size.

    Args:
        slices: the sequences' parts of the packed row.
        call: a call of the indexer; those of other layers have the same parts.
        group: the pool group of the keys.
        size: the tokens per block of the pool.
        device: the device of the pool.

    Raises:
        UsageError: a sequence does not hold the blocks of all of its tokens.
    """
    runs: list[list[RequestSlice]] = []
    singles: dict[int, list[RequestSlice]] = {}
    for part in slices:
        if part.count == 1 and call.batched:
            # With others of up to twice the pages: padding never doubles the work.
            singles.setdefault((-(-part.end // size)).bit_length(), []).append(part)
        else:
            most = max(1, _MOST_SCORES // (call.num_heads * part.end))
            runs += [[one] for one in part.divided(most)]
    return [_part(run, group, size, device) for run in [*runs, *singles.values()]]


def _part(run: Sequence[RequestSlice], group: int, size: int, device: torch.device) -> IndexPart:
    ends = np.array([one.end for one in run])
    pages = padded_blocks([one.sequence.tables[group] for one in run], -(-ends // size))
    counted = np.arange(run[0].count)
    rows = np.array([[one.first_row] for one in run]) + counted
    positions = np.array([[one.start] for one in run]) + counted
    slots = np.take_along_axis(pages, positions // size, 1) * size + positions % size
    return IndexPart(
        torch.from_numpy(rows).to(device),
        torch.from_numpy(positions).to(device),
        int(ends.max()),
        SlotNumbers(slots.reshape(-1), device),
        PageNumbers(torch.from_numpy(pages.reshape(-1)).to(device)),
    )
