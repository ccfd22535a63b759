"""What one forward pass works on: all requests' tokens packed in a row, and where their KV lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvconnect.engine.attention import Chunk, DecodeGroup, attend_chunk, attend_group
from kvconnect.engine.pages import LayerPages
from kvconnect.errors import UsageError
from kvconnect.request import LlmRequest, RequestState

__all__ = ["ForwardStep", "LayerHooks", "first_scheduled_token"]

_Ids = npt.NDArray[np.int64]


class LayerHooks(Protocol):
    """Who is told where the forward pass stands; the connector manager is one."""

    def wait_for_layer_load(self, layer_idx: int) -> None:
        """After this, loaded KV of the layer may be read."""

    def save_kv_layer(self, layer_idx: int) -> None:
        """The layer's KV of this step is written."""


@dataclass(frozen=True, slots=True)
class _Slice:
    """One request's part of the packed row: its tokens ``start..end`` and its blocks."""

    request: LlmRequest
    start: int
    end: int
    table: _Ids


def first_scheduled_token(request: LlmRequest) -> int:
    """The first token of `request` to compute: behind what a load of this step brings."""
    return max(request.num_computed_tokens, request.num_external_tokens)


class ForwardStep:
    """The ``kv=`` argument of one forward pass: writes K/V into the pool and attends over it.

    Requests are packed along one dimension; `position_ids` carries each token's place in its own
    sequence. Several tokens of one request are a chunk, single tokens are batched by length.

    Attributes:
        input_ids, position_ids: ``[1, tokens]`` int64.
        last_tokens: ``[requests]`` int64, the place of each request's last token in the row.
    """

    def __init__(
        self,
        requests: Sequence[LlmRequest],
        tables: Mapping[int, Sequence[int]],
        layers: Sequence[LayerPages],
        hooks: LayerHooks,
        *,
        device: torch.device,
    ) -> None:
        self._layers = layers
        self._hooks = hooks
        self._device = device
        self._layers_done = 0
        self._tokens_per_block = size = layers[0].keys.shape[1]
        slices = [_slice(request, tables[request.request_id]) for request in requests]
        counts = np.array([part.end - part.start for part in slices])
        ends = np.cumsum(counts)
        positions = np.concatenate([np.arange(part.start, part.end) for part in slices])
        tokens = np.concatenate([p.request.tokens.view[p.start : p.end] for p in slices])
        self.input_ids = self._tensor(tokens)[None]
        self.position_ids = self._tensor(positions)[None]
        self.last_tokens = self._tensor(ends - 1)
        self._blocks, self._offsets = self._slots(slices)
        self._blank = self._blank_slots(slices)
        self._chunks = [
            tile
            for part, count, end in zip(slices, counts.tolist(), ends.tolist(), strict=True)
            if count > 1
            for tile in Chunk.tiles(end - count, part.start, count, self._tensor(part.table), size)
        ]
        self._groups = self._decode_groups(slices, ends)

    def attend(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None,
        window: int | None,
    ) -> Tensor:
        """Write one layer's keys and values, and attend over all that is cached.

        Args:
            layer_idx: layers come in ascending order.
            query: ``[1, heads, tokens, dim]``.
            key: ``[1, kv_heads, tokens, dim]``.
            value: ``[1, kv_heads, tokens, value_dim]``.
            scaling: of the scores.
            window: how many tokens each one sees, itself included; ``None``: all.

        Returns:
            ``[1, tokens, heads, value_dim]``.
        """
        if layer_idx != self._layers_done:
            raise UsageError(f"layer {layer_idx} ran when layer {self._layers_done} was due")
        self._hooks.wait_for_layer_load(layer_idx)
        pages = self._layers[layer_idx]
        pages.write(self._blocks, self._offsets, key[0].transpose(0, 1), value[0].transpose(0, 1))
        if self._blank is not None:
            pages.blank(*self._blank)
        _, heads, tokens, _ = query.shape
        out = query.new_empty(tokens, heads, value.shape[-1])
        for chunk in self._chunks:
            attend_chunk(chunk, pages, query, key, value, out, scaling=scaling, window=window)
        for group in self._groups:
            attend_group(group, pages, query, out, scaling=scaling, window=window)
        self._hooks.save_kv_layer(layer_idx)
        self._layers_done += 1
        return out[None]

    def check_complete(self) -> None:
        """Every layer went through `attend` exactly once.

        Raises:
            UsageError: one did not, so the model's output is not that of its cache.
        """
        if self._layers_done != len(self._layers):
            raise UsageError(
                f"{self._layers_done} of {len(self._layers)} attention layers used the KV cache"
            )

    def _slots(self, slices: Sequence[_Slice]) -> tuple[Tensor, Tensor]:
        size = self._tokens_per_block
        places = [np.arange(part.start, part.end) for part in slices]
        blocks = [part.table[place // size] for part, place in zip(slices, places, strict=True)]
        return self._tensor(np.concatenate(blocks)), self._tensor(np.concatenate(places) % size)

    def _blank_slots(self, slices: Sequence[_Slice]) -> tuple[Tensor, Tensor] | None:
        # A block's unused slots hold whatever was there before: another tenant's keys, or bytes
        # that are no numbers and would spread through masked attention. They are zeroed when a
        # request first writes into the block; afterwards it only adds tokens of its own.
        size = self._tokens_per_block
        blocks: list[int] = []
        offsets: list[int] = []
        for part in slices:
            began = part.request.state is RequestState.CONTEXT or part.start % size == 0
            if began and part.end % size:
                tail = range(part.end % size, size)
                blocks += [int(part.table[part.end // size])] * len(tail)
                offsets += tail
        if not blocks:
            return None
        return self._tensor(np.array(blocks)), self._tensor(np.array(offsets))

    def _decode_groups(self, slices: Sequence[_Slice], ends: _Ids) -> list[DecodeGroup]:
        # Batched with others of up to twice the pages: padding never doubles the work.
        members: dict[int, list[int]] = {}
        for index, part in enumerate(slices):
            if part.end - part.start == 1:
                pages = -(-part.end // self._tokens_per_block)
                members.setdefault(pages.bit_length(), []).append(index)
        return [
            DecodeGroup(
                rows=self._tensor(ends[group] - 1),
                lengths=[slices[index].end for index in group],
                tables=[slices[index].table for index in group],
                tokens_per_block=self._tokens_per_block,
            )
            for group in members.values()
        ]

    def _tensor(self, array: npt.NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64, copy=False)).to(self._device)


def _slice(request: LlmRequest, table: Sequence[int]) -> _Slice:
    start = first_scheduled_token(request)
    return _Slice(
        request, start, start + request.num_scheduled_tokens, np.asarray(table, dtype=np.int64)
    )
