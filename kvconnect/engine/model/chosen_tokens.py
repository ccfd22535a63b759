"""Attends to tokens that an index chose: to a few of each sequence, others for every query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvconnect.engine.model.attention import BlockTable, held_blocks
from kvconnect.engine.model.pages import LayerPages
from kvconnect.engine.model.scores import AttentionInput, single_attended

_MOST_KEYS = 1 << 24
"""Elements of keys that are gathered at once."""


@dataclass(frozen=True, slots=True, eq=False)
class ChosenTokens:
    """The locations of the tokens of a step's sequences, for queries that see a few of them.

    Attributes:
        sequences: the number of each query's sequence, ``[tokens, 1]`` int64.
        positions: the position of each query in its sequence, ``[tokens, 1]`` int64.
        blocks: block ids of each sequence, ``[sequences, blocks]`` int64, filled up with ids that
            are not used.
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
        blocks = np.zeros((len(tables), -(-max(ends) // tokens_per_block)), np.int64)
        for row, table, end in zip(blocks, tables, ends, strict=True):
            held = held_blocks(table, 0, -(-end // tokens_per_block))
            row[: len(held)] = held
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
