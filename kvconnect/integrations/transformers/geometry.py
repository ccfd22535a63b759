"""The KV of a loaded model for each token, found with a pass over one token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvconnect.engine.model.declared import checked_windows
from kvconnect.engine.model.model import PositionLimit, position_limit
from kvconnect.engine.model.pool_groups import effective_windows, group_layouts
from kvconnect.engine.model.seam import LayerShape
from kvconnect.errors import UnsupportedModel
from kvconnect.layout import KvCacheLayout

__all__ = ["ModelGeometry"]

_SERVED = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """The layout of a model's keys and values in blocks, as in kvconnect's own engine.

    Attributes:
        layouts: of each group of layers.
        device: of keys and values.
        limit: beyond so many tokens keys and values are others, or none; ``None``: no limit.
    """

    layouts: tuple[KvCacheLayout, ...]
    device: torch.device
    limit: PositionLimit | None

    @classmethod
    def of(cls, model: PreTrainedModel, tokens_per_block: int) -> ModelGeometry:
        """Returns the geometry of `model`, which computes one token for this.

        Raises:
            UnsupportedModel: it keeps something else than keys and values of every layer; the
                message is the reason.
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
            LayerShape(keys.shape[1], keys.shape[3], values.shape[3], window)
            for (keys, values), window in zip(shapes, windows, strict=True)
        ]
        keys = shapes[0][0]
        if any(
            one.device != keys.device or one.dtype != keys.dtype for two in shapes for one in two
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
        return cls(layouts, keys.device, limit)


def _windows(config: Any, name: str) -> list[int | None]:
    """Returns the window of each layer, as the model's settings declare it."""
    if getattr(config, "attention_chunk_size", None):
        raise UnsupportedModel(f"{name}: chunked attention (attention_chunk_size) is not served")
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * config.num_hidden_layers
    unknown = sorted(set(kinds) - _SERVED)
    if unknown:
        raise UnsupportedModel(f"{name}: layers of type {', '.join(unknown)} are not served")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _probe(model: PreTrainedModel, name: str, num_layers: int) -> list[tuple[Tensor, Tensor]]:
    """Returns keys and values that each layer keeps of one token, ``[batch, heads, 1, dim]``."""
    past = DynamicCache()
    zero = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with torch.no_grad():
        model(input_ids=zero, past_key_values=past, use_cache=True)
    layers: list[Any] = past.layers
    shapes = [(one.keys, one.values) for one in layers if one.is_initialized]
    if len(shapes) != num_layers or len(layers) != num_layers:
        raise UnsupportedModel(
            f"{name}: {len(shapes)} of {num_layers} layers keep keys and values in the cache; all "
            "must"
        )
    for keys, values in shapes:
        if keys.ndim != 4 or keys.shape[:3] != values.shape[:3] or keys.shape[2] != 1:
            raise UnsupportedModel(
                f"{name}: keys {tuple(keys.shape)} and values {tuple(values.shape)} of one token; "
                "[batch, heads, tokens, dim] is needed"
            )
    return shapes
