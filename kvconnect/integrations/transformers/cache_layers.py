"""The layers of transformers' caches: keys, values and states, and their blocks.

A recurrent layer (a gated delta net, Mamba, a short convolution) keeps tensors of a fixed size that
stand for all tokens so far. A snapshot is a copy of them after the last token of a block.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.layout import KvCacheLayout, StateTensor

LayerTensors = tuple[Tensor, Tensor]
"""A layer's keys and values, ``[batch, tokens, heads, dim]`` each, of any strides."""


def new_layers(
    layouts: Sequence[KvCacheLayout],
    *,
    batch: int,
    num_tokens: int,
    device: torch.device,
    zeroed: bool,
) -> dict[int, LayerTensors]:
    """Returns memory for `num_tokens` tokens of each attention layer, by the layer's number.

    A block is one contiguous piece of it for each layer, which is fast to copy.
    """
    made = torch.zeros if zeroed else torch.empty
    layers: dict[int, LayerTensors] = {}
    for layout in layouts:
        for number in layout.layer_numbers if layout.kind != "state" else ():
            keys, values = (
                made(
                    (batch, num_tokens, layout.num_kv_heads, dim),
                    dtype=layout.dtype,
                    device=device,
                )
                for dim in (layout.key_dim, layout.value_dim)
            )
            layers[number] = (keys, values)
    return dict(sorted(layers.items()))


def as_blocks(
    layers: Mapping[int, LayerTensors], layout: KvCacheLayout, row: int, tokens: range
) -> PagedKv:
    """Returns the whole blocks of a pool group that these `tokens` of a `row` fill."""
    size = layout.tokens_per_block
    views = [
        torch.unflatten(tensor[row, tokens.start : tokens.stop], 0, (len(tokens) // size, size))
        for number in layout.layer_numbers
        for tensor in layers[number]
    ]
    return PagedKv.from_views(views, per_layer=2)


def tail_block(
    layers: Mapping[int, LayerTensors], layout: KvCacheLayout, row: int, tokens: range
) -> PagedKv:
    """Returns a block of a copy of these `tokens`, fewer than fill it, and then zeros."""
    views = []
    for number in layout.layer_numbers:
        for tensor in layers[number]:
            block = tensor.new_zeros((1, layout.tokens_per_block, *tensor.shape[2:]))
            block[0, : len(tokens)] = tensor[row, tokens.start : tokens.stop]
            views.append(block)
    return PagedKv.from_views(views, per_layer=2)


def state_block(snapshot: Tensor, layout: KvCacheLayout, row: int) -> PagedKv:
    """Returns the snapshot of a `row`, of `new_snapshot`, as a block."""
    return PagedKv.from_pool(snapshot[row : row + 1], layout)


# A frame of more is divided, as all staging memory is made of slots for the largest frame.
_FRAME_NBYTES = 4 << 20


def empty_cache(config: PreTrainedConfig) -> DynamicCache:
    """Returns a cache for a model of this configuration, with all tokens of sliding windows.

    Its layers are made lazily, unless the configuration declares recurrent ones.
    """
    cache = DynamicCache()
    try:
        declared: list[Any] = DynamicCache(config=config).layers
    except (KeyError, TypeError, ValueError):
        return cache  # kinds without a layer class in transformers: the probe shows their states
    if any(isinstance(one, LinearAttentionCacheLayerMixin) for one in declared):
        cache.layers = [_empty(one) for one in declared]
    return cache


def _empty(layer: Any) -> Any:
    """Returns an empty layer that keeps what `layer` does, without its window."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        keeps_keys = isinstance(layer, DynamicLayer)
        kind: Any = LinearAttentionAndFullAttentionLayer if keeps_keys else LinearAttentionLayer
        return kind(layer.number_of_states)
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        return DynamicLayer()  # type: ignore[no-untyped-call]
    return type(layer)()


def attention_layers(layers: Sequence[Any]) -> dict[int, Any]:
    """Returns the layers that hold keys and values, by number."""
    return {
        number: one
        for number, one in enumerate(layers)
        if isinstance(one, DynamicLayer) and one.is_initialized
    }


def recurrent_layers(layers: Sequence[Any]) -> dict[int, Any]:
    """Returns the layers that hold states, by number."""
    return {
        number: one
        for number, one in enumerate(layers)
        if isinstance(one, LinearAttentionCacheLayerMixin)
    }


def state_tensors(layers: Sequence[Any]) -> dict[tuple[int, str], Tensor]:
    """Returns the tensors of all states, ``[batch, …]``, by the layer's number and a name."""
    found: dict[tuple[int, str], Tensor] = {}
    for number, layer in recurrent_layers(layers).items():
        kinds = (("conv", layer.conv_states), ("recurrent", layer.recurrent_states))
        for kind, states in kinds:
            for index, tensor in states.items():
                if tensor is not None:
                    found[number, f"{kind}.{index}"] = tensor
    return found


def layer_tensors(layers: Sequence[Any]) -> dict[int, LayerTensors]:
    """Returns views of the keys and values of each attention layer, by number."""
    return {
        number: (one.keys.transpose(1, 2), one.values.transpose(1, 2))
        for number, one in attention_layers(layers).items()
    }


def cached_tensors(layers: Sequence[Any]) -> list[Tensor]:
    """Returns all tensors that a cache keeps: keys, values and states."""
    kept = [
        tensor for one in attention_layers(layers).values() for tensor in (one.keys, one.values)
    ]
    return kept + list(state_tensors(layers).values())


def state_layouts(layers: Sequence[Any], tokens_per_block: int) -> tuple[KvCacheLayout, ...]:
    """Returns the layouts of snapshots of the states in `layers`, which hold at least one token.

    Layers of one size share a frame, up to 4 MiB of it.
    """
    by_layer: dict[int, list[StateTensor]] = {}
    for (layer, name), tensor in state_tensors(layers).items():
        made = StateTensor(layer, name, tuple(tensor.shape[1:]), tensor.dtype)
        by_layer.setdefault(layer, []).append(made)
    by_size: dict[int, list[list[StateTensor]]] = {}
    for tensors in by_layer.values():
        by_size.setdefault(sum(one.nbytes for one in tensors), []).append(tensors)
    layouts = []
    for nbytes, alike in by_size.items():
        step = max(1, _FRAME_NBYTES // max(1, nbytes))
        for first in range(0, len(alike), step):
            some = [one for tensors in alike[first : first + step] for one in tensors]
            layouts.append(KvCacheLayout.of_states(some, tokens_per_block))
    return tuple(layouts)


def new_snapshot(layout: KvCacheLayout, batch: int, device: torch.device) -> Tensor:
    """Returns zeroed memory for a snapshot of each row: ``[batch, layers, 1, bytes]``, uint8."""
    return torch.zeros(layout.flat_shape(batch), dtype=torch.uint8, device=device)


def snapshot_of(
    layers: Sequence[Any], layouts: Sequence[KvCacheLayout]
) -> tuple[Tensor, ...] | None:
    """Returns a copy of the present states for each of `layouts`; see `new_snapshot`.

    Returns ``None`` if they are of other shapes or dtypes, as while a past is recorded. On CUDA the
    copies are enqueued on the current stream.
    """
    present = state_tensors(layers)
    if len(present) != sum(len(layout.states) for layout in layouts):
        return None
    copies = []
    for layout in layouts:
        wanted = [(one, present.get((one.layer, one.name))) for one in layout.states]
        if not all(tensor is not None and _fits(one, tensor) for one, tensor in wanted):
            return None
        first = present[layout.states[0].layer, layout.states[0].name]
        copied = new_snapshot(layout, first.shape[0], first.device)
        for one, room in _rooms(copied, layout):
            room.copy_(present[one.layer, one.name])
        copies.append(copied)
    return tuple(copies)


def positions_of(model: PreTrainedModel, cache: DynamicCache, ids: Tensor) -> dict[str, Tensor]:
    """Returns ``position_ids`` for a pass over `ids`, if `model` takes such and is recurrent.

    Some of these models count from 0 in each pass, unless they are given positions.
    """
    names = inspect.signature(model.forward).parameters
    if not recurrent_layers(cache.layers) or "position_ids" not in names:
        return {}
    start = cache.get_seq_length()
    positions = torch.arange(start, start + ids.shape[1], device=ids.device)
    return {"position_ids": positions.expand(ids.shape[0], -1)}


def can_crop(layers: Sequence[Any]) -> bool:
    """Returns whether transformers can take tokens back from every layer.

    From a short convolution it can while it records the past, as in assisted decoding.
    """
    return all(one.is_croppable and one.record_past for one in recurrent_layers(layers).values())


def fill_keys(layers: list[Any], tensors: Mapping[int, LayerTensors]) -> None:
    """Puts the keys and values of each layer into the empty `layers`, without a copy.

    Layers that are not made yet are appended.
    """
    for number, (keys, values) in tensors.items():
        if number == len(layers):
            layers.append(DynamicLayer())  # type: ignore[no-untyped-call]
        layer = layers[number]
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys.transpose(1, 2), values.transpose(1, 2)


def fill_states(
    layers: Sequence[Any], layouts: Sequence[KvCacheLayout], snapshots: Sequence[Tensor]
) -> None:
    """Puts `snapshots`, one for each of `layouts`, into the empty `layers` of a cache."""
    for layout, snapshot in zip(layouts, snapshots, strict=True):
        for one, room in _rooms(snapshot, layout):
            _fill(layers[one.layer], one.name, room)


def copied_cache(layers: Sequence[Any]) -> DynamicCache:
    """Returns a plain cache with copies of what `layers` hold."""
    cache = DynamicCache()
    copied: list[Any] = [_empty(one) for one in layers]
    for number, layer in attention_layers(layers).items():
        copied[number].update(layer.keys.clone(), layer.values.clone())
    for (number, name), tensor in state_tensors(layers).items():
        _fill(copied[number], name, tensor)
    cache.layers = copied
    return cache


def _fill(layer: Any, name: str, tensor: Tensor) -> None:
    """Puts a state into an empty layer, as the layer does it behind its first tokens."""
    kind, _, index = name.partition(".")
    number = int(index)
    layer.lazy_initialization(**{f"{kind}_states": tensor, "state_idx": number})
    states: Mapping[int, Tensor] = getattr(layer, f"{kind}_states")
    states[number].copy_(tensor)
    if kind == "conv":
        layer.has_previous_state[number] = True


def _fits(wanted: StateTensor, tensor: Tensor) -> bool:
    return tuple(tensor.shape[1:]) == wanted.shape and tensor.dtype == wanted.dtype


def _rooms(snapshot: Tensor, layout: KvCacheLayout) -> Iterator[tuple[StateTensor, Tensor]]:
    """Yields the tensors of `snapshot`, as views ``[batch, …]``."""
    batch = snapshot.shape[0]
    for number, layer in enumerate(layout.layer_numbers):
        for one, at in layout.state_offsets(layer):
            flat = snapshot[:, number, 0, at : at + one.nbytes]
            yield one, flat.view(one.dtype).view(batch, *one.shape)
