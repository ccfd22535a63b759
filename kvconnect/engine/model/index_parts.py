"""The tokens of a step that an indexer is called for at once, and the locations of their keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvconnect.engine.model.attention import held_blocks
from kvconnect.engine.model.group_step import RequestSlice
from kvconnect.engine.model.pages import LayerPages, PageNumbers, SlotNumbers
from kvconnect.engine.model.seam import IndexCall

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
    longest = max(one.end for one in run)
    pages = np.empty((len(run), -(-longest // size)), np.int64)
    for row, one in zip(pages, run, strict=True):
        held = held_blocks(one.sequence.tables[group], 0, -(-one.end // size))
        row[: len(held)], row[len(held) :] = held, held[0]
    counted = np.arange(run[0].count)
    rows = np.array([[one.first_row] for one in run]) + counted
    positions = np.array([[one.start] for one in run]) + counted
    slots = np.take_along_axis(pages, positions // size, 1) * size + positions % size
    return IndexPart(
        torch.from_numpy(rows).to(device),
        torch.from_numpy(positions).to(device),
        longest,
        SlotNumbers(slots.reshape(-1), device),
        PageNumbers(torch.from_numpy(pages.reshape(-1)).to(device)),
    )
