"""Compares what a model declares of its attention with the arguments of its attention.

Windows stand in three places: in the configuration, which transformers' own cache follows; in the
mask that a model asks for; in what it passes to its attention. An engine that follows one of them
computes other tokens than one that follows another. Both the engine and `PromptCache` use this.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from kvconnect.errors import UnsupportedModel

_PROBE = "kvconnect_probe"
_HORIZON = 1 << 20  # tokens; masks are not tested on pairs that are farther apart
_AHEAD = 16

UNSERVED = {
    "cpmant": "tokens of a prompt attend to later ones, so that keys depend on the whole prompt",
    "mpt": "its biases are made for the length of the cache, not for positions",
    "prophetnet": "what it computes of a token depends on the number of tokens in the same call",
    "reformer": "its cache has hidden states and the buckets of random hashes, no keys and values",
    "xlm": "tokens attend to later ones, and to a mask token that `generate()` always appends",
    "xlnet": "each step computes two tokens again, and its cache has hidden states instead of keys",
}
"""The reason why a family is not served."""
_NAMES = re.compile(r"window|attention_chunk|(^|_)sinks?(_|$)")
_HARMLESS = re.compile(r"pattern|layers|indexes|expert|^use_|init")

_MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Layer:
    """The arguments of an attention layer: its mask's function if known, a window, sinks."""

    masked: _MaskFunction | None
    window: int | None
    sinks: bool


@dataclass(slots=True)
class _Recorder:
    masks: list[tuple[Tensor, _MaskFunction]] = field(default_factory=list)
    layers: dict[int, _Layer] = field(default_factory=dict)

    def function_of(self, mask: Tensor | None) -> _MaskFunction | None:
        """Returns the function of `mask`; ``None`` if the model made or changed it itself."""
        return next((function for made, function in self.masks if made is mask), None)


_recorder: ContextVar[_Recorder] = ContextVar("kvconnect_attention_recorder")


def _mask(
    batch_size: int, q_length: int, kv_length: int, *, mask_function: _MaskFunction, **more: Any
) -> Tensor:
    made = torch.ones(
        (batch_size, 1, q_length, kv_length), dtype=torch.bool, device=more.get("device")
    )
    _recorder.get().masks.append((made, mask_function))
    return made


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    recorder = _recorder.get()
    index = getattr(module, "layer_idx", None)
    if isinstance(index, int):
        masked = recorder.function_of(attention_mask)
        recorder.layers[index] = _Layer(masked, sliding_window, s_aux is not None)
    batch, heads, tokens, _dim = query.shape
    return query.new_zeros(batch, tokens, heads, value.shape[-1]), None


AttentionInterface.register(_PROBE, _attention)
AttentionMaskInterface.register(_PROBE, _mask)


def checked_windows(
    model: PreTrainedModel, *, longest: int | None, by_mask: bool = False
) -> tuple[int | None, ...] | None:
    """Returns how far each attention layer of `model` looks back; ``None``: to the first token.

    Computes one token, on the caller's thread, with an attention of its own; the model is used by
    no other thread meanwhile. Its attention implementation is put back, also after an error.

    Args:
        model: loaded, with any attention implementation.
        longest: tokens of the longest sequence. A window that holds it all is none.
        by_mask: true to accept a window that only the mask and the configuration have. Attention
            that is computed with masks, as by default, has it; flash attention does not.

    Returns:
        The windows; ``None`` if the model has no attention interface, so that they are not known.

    Raises:
        UnsupportedModel: the configuration, the masks and attention's arguments differ; attention
            looks ahead; or a window, chunk or sink of the configuration reaches no attention.
    """
    config = model.config.get_text_config(decoder=True)
    if reason := UNSERVED.get(str(config.model_type)):
        raise UnsupportedModel(f"{type(model).__name__} is not served: {reason}")
    recurrent = getattr(model, "_is_stateful", False)
    if not recurrent and not getattr(model, "_supports_attention_backend", False):
        return None
    layers = _probed(model)
    declared = declared_windows(config, longest=longest)
    windows: list[int | None] = []
    for index in sorted(layers):
        layer = layers[index]
        window = _narrowed(layer.window, longest)
        told = {"what it tells its attention": window}
        if layer.masked is not None:
            told["its mask"] = _window_of(layer.masked, longest)
            if by_mask and window is None:
                window = told["what it tells its attention"] = told["its mask"]
        if index < len(declared):
            told["its configuration"] = declared[index]
        if len(set(told.values())) > 1:
            said = ", ".join(f"{who} {one or 'none'}" for who, one in told.items())
            raise UnsupportedModel(
                f"layer {index} of {type(model).__name__} has several attention windows: {said}"
            )
        windows.append(window)
    sinks = any(layer.sinks for layer in layers.values())
    _refuse_unseen(config, windows, longest, sinks=sinks)
    return tuple(windows)


def declared_windows(
    config: PreTrainedConfig, *, longest: int | None = None
) -> tuple[int | None, ...]:
    """Returns the window of each layer by the configuration, as transformers' own cache has it.

    Args:
        config: the configuration of the decoder.
        longest: see `checked_windows`.
    """
    cache = DynamicCache(config=config)
    return tuple(
        _narrowed(getattr(layer, "sliding_window", None), longest) for layer in cache.layers
    )


def _narrowed(window: int | None, longest: int | None) -> int | None:
    return None if window is None or (longest is not None and window >= longest) else window


def _probed(model: PreTrainedModel) -> dict[int, _Layer]:
    recorder = _Recorder()
    zero = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    token = _recorder.set(recorder)
    try:
        with _with_attention(model, _PROBE), torch.no_grad():
            model(input_ids=zero, use_cache=False)
    finally:
        _recorder.reset(token)
    return recorder.layers


@contextmanager
def _with_attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Sets the attention implementation of `model` and all its parts, and puts it back."""
    found: list[Any] = [getattr(one, "config", None) for one in model.modules()]
    configs = {id(one): one for one in found if isinstance(one, PreTrainedConfig)}
    kept = [(one, one._attn_implementation_internal) for one in configs.values()]  # noqa: SLF001
    try:
        for config in configs.values():
            config._attn_implementation_internal = name  # noqa: SLF001  the setter changes parts
        yield
    finally:
        for config, implementation in kept:
            config._attn_implementation_internal = implementation  # noqa: SLF001


def _window_of(mask: _MaskFunction, longest: int | None) -> int | None:
    """Returns the window of `mask`, from what some tokens see.

    Raises:
        UnsupportedModel: it is no causal mask with a window or without.
    """
    horizon = min(longest or _HORIZON, _HORIZON)
    window: int | None = None
    for position in (horizon - 1, horizon // 2, 1, 0):
        seen = _seen(mask, position)
        if bool(seen[position + 1 :].any()):
            raise UnsupportedModel("bidirectional attention is not served; causal models only")
        first = position + 1 - int(seen.sum())
        if position == horizon - 1 and first > 0:
            window = position + 1 - first
        expected = 0 if window is None else max(0, position + 1 - window)
        if first != expected or not bool(seen[first : position + 1].all()):
            raise UnsupportedModel("attention with masks other than windows is not served")
    return window


def _seen(mask: _MaskFunction, position: int) -> Tensor:
    """Returns which tokens the one at `position` sees, and some after it."""
    zero = torch.zeros((), dtype=torch.int64)
    others = torch.arange(position + 1 + _AHEAD)
    try:
        seen = mask(zero, zero, torch.tensor(position), others)
    except (IndexError, RuntimeError) as error:
        raise UnsupportedModel(
            f"the model's attention mask is not one of positions alone ({error})"
        ) from error
    return torch.as_tensor(seen).expand(len(others))


def _refuse_unseen(
    config: PreTrainedConfig, windows: Sequence[int | None], longest: int | None, *, sinks: bool
) -> None:
    """Refuses a window, chunk or sink that the configuration sets and no layer has."""
    kinds = getattr(config, "layer_types", None) or ()
    for name, value in config.to_dict().items():
        if _NAMES.search(name) is None or _HARMLESS.search(name) is not None:
            continue
        if not isinstance(value, int) or value <= 0:
            continue
        if sinks and value is True and "sink" in name:
            continue  # a switch of the sinks that layers have
        if name == "sliding_window" and kinds and "sliding_attention" not in kinds:
            continue  # these types name the layers that have it
        window = value > 1 and "window" in name
        if window and (value in windows or _narrowed(value, longest) is None):
            continue
        raise UnsupportedModel(
            f"{name}={value} in the model's configuration is not passed to its attention"
        )
