"""The input of one forward pass: all requests' tokens packed in a row, and their KV slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvconnect.engine.model.chosen_tokens import IndexPart, index_parts
from kvconnect.engine.model.drafted import DraftedStates
from kvconnect.engine.model.group_step import GroupStep
from kvconnect.engine.model.pages import LayerPages
from kvconnect.engine.model.scores import AttentionInput
from kvconnect.engine.model.seam import IndexCall
from kvconnect.engine.model.sequence_step import RequestSlice, SequenceStep
from kvconnect.engine.model.states import StateSlots
from kvconnect.errors import UsageError


class LayerHooks(Protocol):
    """The hooks that follow the forward pass; the connector manager has them."""

    def wait_for_layer_load(self, layer_idx: int) -> None:
        """Waits until loaded KV of the layer may be read."""

    def save_kv_layer(self, layer_idx: int) -> None:
        """Announces that the layer's KV of this step is written."""


@dataclass(frozen=True, slots=True)
class _SomeHooks:
    """The hooks of a part of a step: those of the layers are called once a step."""

    hooks: LayerHooks
    waits: bool
    saves: bool

    def wait_for_layer_load(self, layer_idx: int) -> None:
        if self.waits:
            self.hooks.wait_for_layer_load(layer_idx)

    def save_kv_layer(self, layer_idx: int) -> None:
        if self.saves:
            self.hooks.save_kv_layer(layer_idx)


@dataclass(frozen=True, slots=True, eq=False)
class CachedLayer:
    """An attention layer of the model: its KV memory, its pool group, and its window.

    Attributes:
        pages: its memory.
        group: the pool group, whose block tables it uses.
        window: the number of tokens that each token sees, itself included; ``None``: all.
    """

    pages: LayerPages
    group: int = 0
    window: int | None = None


class ForwardStep:
    """The ``kv=`` argument of one forward pass: writes K/V into the pools and attends over them.

    Sequences are packed along one dimension; `position_ids` has each token's position in its own.

    Args:
        plan: the sequences to compute; at least one.
        layers: the attention layers of the model.
        hooks: called for every layer.
        device: the device of the model.
        slots: the slots of recurrent states; ``None``: the model has none. Sequences that had
            drafts in the step before continue behind the accepted ones.

    Attributes:
        start: the position of the first sequence's first token.
        input_ids, position_ids: ``[1, tokens]`` int64.
        last_tokens: ``[rows]`` int64, the rows whose logits are computed: the last ``num_wanted``
            of each sequence of `plan`.

    Raises:
        UsageError: a token has no block to be written to.
    """

    def __init__(
        self,
        plan: Sequence[SequenceStep],
        layers: Sequence[CachedLayer],
        hooks: LayerHooks,
        *,
        device: torch.device,
        slots: StateSlots | None = None,
    ) -> None:
        if slots is not None:
            slots.proceed(plan)
        self._plan = plan
        self._slots = slots
        self.start = plan[0].start
        self._layers = layers
        self._hooks = hooks
        self._device = device
        self._layers_done = 0
        self._indexes_done = 0
        self._slices = slices = _slices(plan)
        self._index_parts: dict[tuple[int, int], list[IndexPart]] = {}
        positions = np.concatenate([np.arange(part.start, part.end) for part in slices])
        self.input_ids = self._tensor(np.concatenate([one.tokens for one in plan]))[None]
        self.position_ids = self._tensor(positions)[None]
        self.last_tokens = self._tensor(np.concatenate([_wanted(part) for part in slices]))
        size = layers[0].pages.keys.shape[1] if layers else 0
        groups = range(len(plan[0].tables) if layers else 0)
        self._groups = [GroupStep(slices, group, size, device) for group in groups]

    @cached_property
    def states(self) -> DraftedStates | None:
        """The cache that the model is called with; ``None``: it has no recurrent layers."""
        if self._slots is None:
            return None
        return DraftedStates(self._plan, self._slots, self._device)

    def attend(self, layer_idx: int, given: AttentionInput) -> Tensor:
        """Writes one layer's keys and values, and attends over all that is cached.

        Args:
            layer_idx: layers come in ascending order. Between recurrent layers, attention layers
                are counted, and `states` checks their order.
            given: the input, with the model's own window; the layer's window may be a shorter,
                configured one. Queries may be those of `last_tokens` only.

        Returns:
            ``[1, queries, heads, value_dim]``.

        Raises:
            UsageError: layers came out of order, or a page in the window is not held.
        """
        layer, group = self._begin(None if self.states is not None else layer_idx)
        pages = layer.pages
        # Attention uses the values that a later request would read, also for tokens that are not
        # read back.
        key, value = pages.as_stored(given.key), pages.as_stored(given.value)
        group.write(pages, key[0].transpose(0, 1), value[0].transpose(0, 1))
        given = AttentionInput(  # `replace` takes three times as long
            given.query,
            key,
            value,
            scaling=given.scaling,
            window=layer.window,
            softcap=given.softcap,
            sinks=given.sinks,
            latents=given.latents,
            chosen=given.chosen,
        )
        out = group.attend(given, pages)
        self._end()
        return out[None]

    def choose(self, call: IndexCall) -> Tensor:
        """Writes the index keys of one layer, and chooses the tokens that it attends to.

        Args:
            call: the call of the layer's indexer, which comes before its attention.

        Returns:
            ``[tokens, most]``; see `AttentionInput.chosen`.

        Raises:
            UsageError: a page of a sequence is not held.
        """
        layer, group = self._begin(None)
        group.blank(layer.pages)
        key = layer.group, call.num_heads
        if (parts := self._index_parts.get(key)) is None:
            size = layer.pages.keys.shape[1]
            parts = self._index_parts[key] = index_parts(
                self._slices, call, layer.group, size, device=self._device
            )
        found = [
            call.chosen(part.rows, part.seen, partial(part.append, layer.pages)) for part in parts
        ]
        most = max(one.shape[1] for one in found)
        chosen = found[0].new_full((call.num_tokens, most), -1)
        for part, one in zip(parts, found, strict=True):
            chosen[part.rows.flatten(), : one.shape[1]] = one
        self._end()
        self._indexes_done += 1
        return chosen

    def append(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Writes one layer's keys and values of a step of `apart`; see `own_attention`.

        Args:
            layer_idx: layers come in ascending order.
            key: the keys of the tokens of this step, ``[sequences, kv_heads, tokens, dim]``.
            value: their values, alike.

        Returns:
            Copies of all keys and values, ``[sequences, kv_heads, n, dim]`` each; shorter sequences
            are behind padding.

        Raises:
            UsageError: layers came out of order, or a page of the sequence is not held.
        """
        layer, group = self._begin(layer_idx)
        group.write(layer.pages, *(both.transpose(1, 2).flatten(0, 1) for both in (key, value)))
        keys, values = group.gather(layer.pages)
        self._end()
        return keys, values

    def apart(self, *, padded: bool) -> Iterator[tuple[list[int], ForwardStep]]:
        """Yields parts of the step, one after the other: the numbers of sequences, and their step.

        Single tokens at one position are a part, if there are no recurrent states. Every other
        sequence is one of its own. Loads of a layer are waited for in the first part, and its KV is
        announced in the last one.

        Args:
            padded: true to put single tokens together whose sequences are up to twice as long as
                others.
        """
        members: dict[tuple[int, int], list[int]] = {}
        for number, one in enumerate(self._plan):
            single = len(one.tokens) == 1 and self._slots is None
            alike = one.end.bit_length() if padded else one.end
            members.setdefault((alike, -1) if single else (0, number), []).append(number)
        # None begins when others have ended, and would free what they keep for their drafts.
        steps = [
            ForwardStep(
                [self._plan[number] for number in numbers],
                self._layers,
                _SomeHooks(self._hooks, waits=index == 0, saves=index == len(members) - 1),
                device=self._device,
                slots=self._slots,
            )
            for index, numbers in enumerate(members.values())
        ]
        yield from zip(members.values(), steps, strict=True)

    def check_complete(self) -> None:
        """Checks that every layer used `attend` exactly once; recurrent states count from then on.

        Raises:
            UsageError: a layer did not, so the model's output does not match its cache.
        """
        if self._layers_done != len(self._layers):
            raise UsageError(
                f"{self._layers_done} of {len(self._layers)} attention layers used the KV cache"
            )
        if self.states is not None:
            self.states.end()

    def _begin(self, layer_idx: int | None) -> tuple[CachedLayer, GroupStep]:
        """Waits until the next layer's loaded KV may be read.

        Args:
            layer_idx: the number of the attention layer, which is checked; ``None``: not known.
        """
        due = self._layers_done - self._indexes_done
        if layer_idx is not None and layer_idx != due:
            raise UsageError(f"layer {layer_idx} ran when layer {due} was due")
        self._hooks.wait_for_layer_load(self._layers_done)
        layer = self._layers[self._layers_done]
        return layer, self._groups[layer.group]

    def _end(self) -> None:
        self._hooks.save_kv_layer(self._layers_done)
        self._layers_done += 1

    def _tensor(self, array: npt.NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64, copy=False)).to(self._device)


def _slices(plan: Sequence[SequenceStep]) -> list[RequestSlice]:
    slices = []
    row = 0
    for one in plan:
        slices.append(RequestSlice(one, one.start, one.end, row, row))
        row += len(one.tokens)
    return slices


def _wanted(part: RequestSlice) -> npt.NDArray[np.int64]:
    stop = part.first_row + part.count
    return np.arange(stop - part.sequence.num_wanted, stop)
