"""The check that a model computes the same with a cache as without one."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import PreTrainedModel

from kvconnect.digest.doubts import Doubt
from kvconnect.errors import UnsupportedModel
from kvconnect.integrations.transformers.cache_layers import (
    empty_cache,
    positions_of,
    recurrent_layers,
    state_tensors,
)
from kvconnect.integrations.transformers.guard import canary_ids, results_of
from kvconnect.integrations.transformers.twin import twin_of

_NUM_TOKENS = 24
_SPLIT = 16
_WINDOW = 8  # instead of the model's own, so that a short prompt crosses it
_UNLIMITED = 1 << 20
_NARROW = {torch.float16, torch.bfloat16}
# A share of the largest result; products of other shapes are summed up in another order.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_TOLERANCE_NARROW = 0.1


def refuse_effects_of_cache(model: PreTrainedModel, *, has_windows: bool) -> None:
    """Computes 24 tokens with and without a cache, also across every declared window.

    Windows are first narrowed to 8 tokens, in a model of the same class with the same weights. If
    modules were added to the model, its class does not make an equal one. Then windows are taken
    from the configuration unchecked. Makes three passes, or six with windows.

    Args:
        model: is not changed.
        has_windows: its configuration declares windows below the longest sequence.

    Raises:
        UnsupportedModel: results differ, or a declared window changes nothing; the message is the
            reason.
    """
    name = type(model).__name__
    ids = canary_ids(model, _NUM_TOKENS)
    with torch.no_grad():
        narrowest = _dtype_of_states(model)
        if not _alike(*_both(model, ids), narrowest):
            raise UnsupportedModel(f"{name}: {_reason(model)}")
        if not has_windows:
            return
        narrow = _Narrowed(model, _WINDOW)
        if not narrow.is_like(model):
            return
        alone, cached = _both(narrow, ids)
        wide = results_of(_Narrowed(model, _UNLIMITED)(input_ids=ids, use_cache=False))
        if torch.equal(alone, wide):
            raise UnsupportedModel(f"{name}: {Doubt.WINDOW_UNSEEN.sentence}")
        if not _alike(alone, cached, narrowest):
            raise UnsupportedModel(f"{name}: its window depends on the cache that it is given")


class _Narrowed:
    """A model with another window: the same weights in modules of another configuration."""

    def __init__(self, model: PreTrainedModel, window: int) -> None:
        config = deepcopy(model.config)
        text: Any = config.get_text_config(decoder=True)
        text.sliding_window = window
        self._twin = twin_of(model, config)
        self._tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(
            model.named_buffers(remove_duplicate=False)
        )

    def is_like(self, model: PreTrainedModel) -> bool:
        """Returns whether both models have the same modules."""
        kinds = [[type(one) for one in made.modules()] for made in (self._twin, model)]
        return kinds[0] == kinds[1]

    @property
    def forward(self) -> Any:
        """The model's ``forward``, for its parameters."""
        return self._twin.forward

    @property
    def config(self) -> Any:
        """The configuration with the other window."""
        return self._twin.config

    def __call__(self, **named: Any) -> Any:
        return functional_call(self._twin, self._tensors, (), named)


def _both(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns results without a cache, and with one that two passes fill."""
    past = empty_cache(model.config)
    alone = results_of(model(input_ids=ids, use_cache=False))
    parts = []
    for part in (ids[:, :_SPLIT], ids[:, _SPLIT:]):
        positions = positions_of(model, past, part)
        output = model(input_ids=part, past_key_values=past, use_cache=True, **positions)
        parts.append(results_of(output))
    return alone, torch.cat(parts, dim=1)


def _dtype_of_states(model: Any) -> torch.dtype:
    """Returns the narrowest dtype of recurrent states, which is often float32; else float64."""
    past = empty_cache(model.config)
    if not past.layers:
        return torch.float64
    model(input_ids=canary_ids(model, 1), past_key_values=past, use_cache=True)
    dtypes = [one.dtype for one in state_tensors(past.layers).values()]
    return min(dtypes, key=lambda one: one.itemsize, default=torch.float64)


def _alike(one: Tensor, other: Tensor, narrowest: torch.dtype) -> bool:
    """Returns whether results agree. In narrow dtypes a few tokens may differ, as experts do.

    `narrowest` is another dtype that a part of the computation may be in.
    """
    scale = one.abs().max().clamp_min(1e-30)
    deviation = ((one - other).abs().amax(dim=-1) / scale).nan_to_num(nan=0.0)
    dtype = min(one.dtype, narrowest, key=lambda kind: kind.itemsize)
    tolerance = _TOLERANCE.get(dtype, _TOLERANCE_NARROW)
    allowed = _NUM_TOKENS // 4 if dtype in _NARROW else 0
    return int((deviation > tolerance).sum()) <= allowed


def _reason(model: PreTrainedModel) -> str:
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "use_bidirectional_attention", False):
        return Doubt.BIDIRECTIONAL.sentence
    if recurrent_layers(empty_cache(model.config).layers):
        return "its recurrent layers do not go on from their state in a pass over several tokens"
    return (
        "it computes otherwise with a cache than without: its attention also looks ahead, or its "
        "positions depend on the length of the cache"
    )
