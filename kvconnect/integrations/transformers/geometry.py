"""The KV of a loaded model for each token, found with a pass over one token."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvconnect.engine.model.declared import checked_windows
from kvconnect.engine.model.pool_groups import effective_windows, group_layouts
from kvconnect.engine.model.positions import PositionLimit, position_limit
from kvconnect.engine.model.seam import LayerShape
from kvconnect.errors import UnsupportedModel
from kvconnect.integrations.transformers.cache_layers import (
    attention_layers,
    empty_cache,
    recurrent_layers,
    state_layouts,
    state_tensors,
)
from kvconnect.layout import KvCacheLayout

_SERVED = {"full_attention", "sliding_attention"}
# Layers without any cache, of models that have recurrent ones.
_WITHOUT_CACHE = {"moe", "mlp"}
_RECURRENT = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
# The longer pass after which states are as they are behind a prompt.
_PROBE_TOKENS = 4


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """The layout of a model's keys, values and states in blocks.

    Attributes:
        layouts: the layouts of each group of layers: those of attention as in kvconnect's own
            engine, then those of states.
        device: the device of keys and values.
        limit: beyond so many tokens keys and values are others, or none; ``None``: no limit.
    """

    layouts: tuple[KvCacheLayout, ...]
    device: torch.device
    limit: PositionLimit | None

    @property
    def attention(self) -> tuple[KvCacheLayout, ...]:
        """The layouts of keys and values."""
        return tuple(one for one in self.layouts if one.kind != "state")

    @property
    def states(self) -> tuple[KvCacheLayout, ...]:
        """The layouts of snapshots; none for a model without recurrent layers."""
        return tuple(one for one in self.layouts if one.kind == "state")

    @classmethod
    def of(cls, model: PreTrainedModel, tokens_per_block: int) -> ModelGeometry:
        """Returns the geometry of `model`, which computes up to five tokens for this.

        Raises:
            UnsupportedModel: it keeps something else than keys and values, or states that the cache
                has; the message is the reason.
        """
        config = model.config.get_text_config(decoder=True)
        name = type(model).__name__
        if model.config.is_encoder_decoder:
            raise UnsupportedModel(f"{name} has an encoder: models with a decoder only are served")
        limit = position_limit(config)
        longest = None if limit is None else limit.num_tokens
        windows = _windows(config, name)
        checked_windows(model, longest=longest)
        shapes = _probe(model, name, len(windows))
        layers = [
            LayerShape(keys.shape[1], keys.shape[3], values.shape[3], windows[number])
            for number, (keys, values) in shapes.items()
        ]
        keys, _ = next(iter(shapes.values()))
        if any(
            one.device != keys.device or one.dtype != keys.dtype
            for two in shapes.values()
            for one in two
        ):
            raise UnsupportedModel(
                f"{name} keeps keys and values on several devices, or in several dtypes; load it "
                "on one device"
            )
        layouts = group_layouts(
            layers,
            effective_windows(layers, None, longest),
            tokens_per_block=tokens_per_block,
            dtype=keys.dtype,
        )
        states = _probe_states(model, name, tokens_per_block)
        return cls((*_numbered(layouts, list(shapes)), *states), keys.device, limit)


def _numbered(
    layouts: Sequence[KvCacheLayout], numbers: Sequence[int]
) -> tuple[KvCacheLayout, ...]:
    """Returns `layouts` of attention layers with the model's `numbers` of these."""
    return tuple(
        replace(one, layers=tuple(numbers[layer] for layer in one.layers)) for one in layouts
    )


def _windows(config: Any, name: str) -> list[int | None]:
    """Returns the window of each layer, as the model's settings declare it."""
    if getattr(config, "attention_chunk_size", None):
        raise UnsupportedModel(f"{name}: chunked attention (attention_chunk_size) is not served")
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        count, cached = getattr(config, "decoder_layers", None), config.num_hidden_layers
        if count not in (None, cached):
            raise UnsupportedModel(
                f"{name} has {count} layers (decoder_layers), and caches of transformers {cached} "
                f"(num_hidden_layers); set model.config.num_hidden_layers = {count}"
            )
        return [window] * cached
    recurrent = _RECURRENT | _WITHOUT_CACHE if _RECURRENT & set(kinds) else set()
    unknown = sorted(set(kinds) - _SERVED - recurrent)
    if unknown:
        raise UnsupportedModel(f"{name}: layers of type {', '.join(unknown)} are not served")
    return [window if "sliding" in kind else None for kind in kinds]


def _probe(model: PreTrainedModel, name: str, num_layers: int) -> dict[int, tuple[Tensor, Tensor]]:
    """Returns the keys and values of one token by layer, ``[batch, heads, 1, dim]``.

    Raises:
        UnsupportedModel: a layer keeps neither these nor states, or there is no attention layer.
    """
    layers = _after(model, name, 1)
    kept = attention_layers(layers)
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    recurrent = recurrent_layers(layers)
    without = {n for n, kind in enumerate(kinds) if recurrent and kind in _WITHOUT_CACHE}
    without |= {n for n, one in recurrent.items() if not isinstance(one, DynamicLayer)}
    if len(layers) != num_layers or kept.keys() | without != set(range(num_layers)):
        raise UnsupportedModel(
            f"{name}: {len(kept)} of {num_layers - len(without)} layers keep keys and values in "
            "the cache; all must"
        )
    if not kept:
        raise UnsupportedModel(f"{name} has no attention layer, which counts the cache's tokens")
    shapes = {number: (one.keys, one.values) for number, one in kept.items()}
    for keys, values in shapes.values():
        if keys.ndim != 4 or keys.shape[:3] != values.shape[:3] or keys.shape[2] != 1:
            raise UnsupportedModel(
                f"{name}: keys {tuple(keys.shape)} and values {tuple(values.shape)} of one token; "
                "[batch, heads, tokens, dim] is needed"
            )
    return shapes


def _probe_states(
    model: PreTrainedModel, name: str, tokens_per_block: int
) -> tuple[KvCacheLayout, ...]:
    """Returns the layouts of the states that `model` keeps; none without recurrent layers.

    Raises:
        UnsupportedModel: a recurrent layer keeps its state elsewhere.
    """
    if not recurrent_layers(empty_cache(model.config).layers):
        return ()
    layers = _after(model, name, _PROBE_TOKENS, 1)
    with_states = {number for number, _ in state_tensors(layers)}
    lacking = sorted(recurrent_layers(layers).keys() - with_states)
    if lacking:
        raise UnsupportedModel(
            f"{name}: layer {lacking[0]} is recurrent, and keeps its state outside of the cache"
        )
    return state_layouts(layers, tokens_per_block)


def _after(model: PreTrainedModel, name: str, *passes: int) -> list[Any]:
    """Returns the layers of a cache behind passes over so many tokens each."""
    past = empty_cache(model.config)
    layers: list[Any] = past.layers
    if layers and "past_key_values" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModel(
            f"{name} takes no past_key_values; with a cache of another name generate() computes "
            "the whole prompt again"
        )
    with torch.no_grad():
        for num_tokens in passes:
            zeros = torch.zeros(1, num_tokens, dtype=torch.int64, device=model.device)
            try:
                model(input_ids=zeros, past_key_values=past, use_cache=True)
            except ValueError as error:
                raise UnsupportedModel(f"{name}: {error}") from error
    return layers
