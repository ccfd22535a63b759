"""The reads and writes of one forward pass in one pool group."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvconnect.engine.model.attention import (
    Chunk,
    DecodeGroup,
    held_blocks,
    padded_blocks,
)
from kvconnect.engine.model.chosen_tokens import ChosenTokens
from kvconnect.engine.model.pages import LayerPages, PageNumbers, SlotNumbers
from kvconnect.engine.model.scores import AttentionInput
from kvconnect.engine.model.sequence_step import RequestSlice


class GroupStep:
    """The locations of a step's tokens in the pool of one group, for all of its layers.

    Several tokens of one request are a chunk, single tokens are batched by length.

    Args:
        slices: the sequences' parts of the packed row.
        group: the pool group, whose tables are used; -1 in them marks blocks that a sequence does
            not hold.
        tokens_per_block: the tokens per block of the pool.
        device: the device of the pool.

    Raises:
        UsageError: a token of this step has no block.
    """

    def __init__(
        self,
        slices: Sequence[RequestSlice],
        group: int,
        tokens_per_block: int,
        device: torch.device,
    ) -> None:
        self._size = tokens_per_block
        self._device = device
        self._slices = slices
        self._held = [part.sequence.tables[group] for part in slices]
        self._slots = self._written_slots()
        self._blank = self._blank_slots()
        self._parts = self._parts_of(slices)
        self._last_parts: list[Chunk | DecodeGroup] | None = None
        self._pages: PageNumbers | None = None
        self._shifted: Tensor | None = None  # the rows that `gather` takes of its pages

    def write(self, pages: LayerPages, key: Tensor, value: Tensor) -> None:
        """Writes each token's key and value (``[tokens, kv_heads, dim]``) at its slot."""
        pages.write(self._slots, key, value)
        self.blank(pages)

    def blank(self, pages: LayerPages) -> None:
        """Zeroes the slots behind the tokens in blocks that are written for the first time."""
        if self._blank is not None:
            pages.blank(*self._blank)

    def gather(self, pages: LayerPages) -> tuple[Tensor, Tensor]:
        """Returns copies of all keys and values, those of shorter sequences behind padding.

        Returns:
            ``[sequences, kv_heads, longest, dim]`` each. Padding is finite.
        """
        ends = np.array([part.end for part in self._slices])
        longest = int(ends.max())
        if self._pages is None:
            blocks = padded_blocks(self._held, -(-ends // self._size))
            self._pages = PageNumbers(self._tensor(blocks.reshape(-1)))
            if np.ptp(ends):
                first = np.arange(len(ends))[:, None] * blocks.shape[1] * self._size
                place = np.maximum(0, np.arange(longest) - (longest - ends[:, None]))
                self._shifted = self._tensor((first + place).reshape(-1))
        found = pages.gather(self._pages)
        if self._shifted is not None:
            found = found[0].index_select(0, self._shifted), found[1].index_select(0, self._shifted)
        keys, values = (
            both.view(len(ends), -1, *both.shape[1:])[:, :longest].transpose(1, 2) for both in found
        )
        if len(ends) > 1:  # some models view sequences and heads as one dimension
            return keys.contiguous(), values.contiguous()
        return keys, values

    def attend(self, given: AttentionInput, pages: LayerPages) -> Tensor:
        """Attends over the cached tokens; see `ForwardStep.attend`."""
        _, heads, tokens, _ = given.query.shape
        if (chosen := given.chosen) is not None and chosen.shape[1] < self._longest:
            return self._chosen_tokens.attended(chosen, given, pages)
        parts = self._parts
        if tokens < given.key.shape[2]:
            if self._last_parts is None:
                self._last_parts = self._parts_of(_wanted(self._slices))
            parts = self._last_parts
        match parts:
            case [DecodeGroup(all_rows=True) as whole]:
                return whole.attended(given, pages)
        out = given.query.new_empty(tokens, heads, given.value_dim)
        for part in parts:
            part.attend(given, pages, out)
        return out

    @property
    def _longest(self) -> int:
        return max(part.end for part in self._slices)

    @cached_property
    def _chosen_tokens(self) -> ChosenTokens:
        starts = [part.start for part in self._slices]
        ends = [part.end for part in self._slices]
        return ChosenTokens.of(starts, ends, self._held, self._size, self._device)

    def _parts_of(self, slices: Sequence[RequestSlice]) -> list[Chunk | DecodeGroup]:
        chunks = [
            tile
            for part, table in zip(slices, self._held, strict=True)
            if part.count > 1
            for tile in Chunk(
                rows=slice(part.first_row, part.first_row + part.count),
                keys=slice(part.first_key, part.first_key + part.count),
                start=part.start,
                table=table,
                tokens_per_block=self._size,
                device=self._device,
            ).tiles()
        ]
        return [*chunks, *self._decode_groups(slices)]

    def _written_slots(self) -> SlotNumbers:
        size = self._size
        places = [np.arange(part.start, part.end) for part in self._slices]
        blocks = [
            held_blocks(table, part.start // size, -(-part.end // size))[
                place // size - part.start // size
            ]
            for part, table, place in zip(self._slices, self._held, places, strict=True)
        ]
        slots = np.concatenate(blocks) * size + np.concatenate(places) % size
        return SlotNumbers(slots, self._device)

    def _blank_slots(self) -> tuple[Tensor, Tensor] | None:
        # A block's unused slots hold whatever was there before: another tenant's keys, or bytes
        # that are no numbers and would spread through masked attention. They are zeroed when a
        # request first writes into the block; afterwards it only adds tokens of its own.
        size = self._size
        blocks: list[int] = []
        offsets: list[int] = []
        for part, table in zip(self._slices, self._held, strict=True):
            last, used = divmod(part.end, size)
            began = part.sequence.is_prompt or part.start <= last * size
            if began and used:
                tail = range(used, size)
                blocks += [int(table[last])] * len(tail)
                offsets += tail
        if not blocks:
            return None
        return self._tensor(np.array(blocks)), self._tensor(np.array(offsets))

    def _decode_groups(self, slices: Sequence[RequestSlice]) -> list[DecodeGroup]:
        # Batched with others of up to twice the pages: padding never doubles the work.
        members: dict[int, list[int]] = {}
        for index, part in enumerate(slices):
            if part.count == 1:
                pages = -(-part.end // self._size)
                members.setdefault(pages.bit_length(), []).append(index)
        return [
            DecodeGroup(
                rows=self._tensor(np.array([slices[index].first_row for index in group])),
                all_rows=len(group) == len(slices),
                lengths=[slices[index].end for index in group],
                tables=[self._held[index] for index in group],
                tokens_per_block=self._size,
            )
            for group in members.values()
        ]

    def _tensor(self, array: npt.NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64, copy=False)).to(self._device)


def _wanted(slices: Sequence[RequestSlice]) -> list[RequestSlice]:
    """Returns the tokens whose logits are wanted, with their queries side by side."""
    wanted = []
    row = 0
    for part in slices:
        count = part.sequence.num_wanted
        first_key = part.first_key + part.count - count
        wanted.append(RequestSlice(part.sequence, part.end - count, part.end, row, first_key))
        row += count
    return wanted
