"""The layouts of vLLM's KV cache groups, with an error for each that cannot be served."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvconnect.errors import ConfigurationError
from kvconnect.keys import Shard
from kvconnect.layout import KvCacheLayout

__all__ = ["CacheGroup", "cache_groups", "total_heads"]

_WHERE = "KvConnect"
# By name: subclasses of these keep, drop or pack blocks in other ways.
_SERVED = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec")


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """A KV cache group of vLLM.

    Attributes:
        layout: of a block of this rank.
        layer_names: vLLM's names of the layers, in the order of ``layout.layer_numbers``.
        is_latent: one latent vector for each token instead of keys and values (MLA).
    """

    layout: KvCacheLayout
    layer_names: tuple[str, ...]
    is_latent: bool


def cache_groups(kv_cache_config: Any) -> tuple[CacheGroup, ...]:
    """Returns the groups of vLLM's ``KVCacheConfig``, in its order.

    Raises:
        ConfigurationError: a group holds something else than the keys and values of causal
            attention in the model's dtype, or blocks differ in their number of tokens.
    """
    groups = list(kv_cache_config.kv_cache_groups)
    numbers = _layer_numbers([name for group in groups for name in group.layer_names])
    found = tuple(_group(group, numbers) for group in groups)
    if not found:
        raise ConfigurationError(f"{_WHERE}: the model has no KV cache; remove kv_transfer_config")
    sizes = sorted({one.layout.tokens_per_block for one in found})
    if len(sizes) > 1:
        raise ConfigurationError(
            f"{_WHERE}: KV cache groups have blocks of {sizes} tokens; all must have the same"
        )
    return found


def total_heads(groups: Sequence[CacheGroup], shard: Shard, model_heads: int) -> tuple[int, ...]:
    """Returns the number of KV heads of each group in the whole model.

    Args:
        groups: of one rank.
        shard: the rank.
        model_heads: the number of heads in the model's configuration.
    """
    found = []
    for group in groups:
        own, size = group.layout.num_kv_heads, shard.tp_size
        if group.is_latent:
            found.append(1)
        elif size == 1:
            found.append(own)
        else:
            found.append(model_heads if own == max(1, model_heads // size) else own * size)
    return tuple(found)


def _group(group: Any, numbers: Mapping[str, int]) -> CacheGroup:
    spec = _common_spec(group)
    kind = type(spec).__name__
    names = tuple(sorted(group.layer_names, key=numbers.__getitem__))
    _check(group, spec, kind, names[0])
    is_latent = kind == "MLAAttentionSpec"
    window = spec.sliding_window if kind == "SlidingWindowSpec" else None
    try:
        layout = KvCacheLayout(
            num_layers=len(names),
            num_kv_heads=spec.num_kv_heads,
            key_dim=spec.head_size,
            value_dim=0 if is_latent else spec.head_size_v,
            tokens_per_block=spec.block_size,
            dtype=spec.dtype,
            window=window,
            layers=tuple(numbers[name] for name in names),
        )
    except ConfigurationError as error:
        raise ConfigurationError(f"{_WHERE}: layer '{names[0]}': {error} (--block-size)") from error
    return CacheGroup(layout, names, is_latent)


def _common_spec(group: Any) -> Any:
    """Returns the group's spec. If layers have specs of their own, all must be equal."""
    spec = group.kv_cache_spec
    inner = getattr(spec, "kv_cache_specs", None)
    if inner is None:
        return spec
    first, *rest = inner.values()
    if any(one != first for one in rest):
        raise ConfigurationError(
            f"{_WHERE}: layers of one KV cache group differ in what they store ({first} and "
            f"{next(one for one in rest if one != first)}); this model is not served"
        )
    return first


def _check(group: Any, spec: Any, kind: str, layer: str) -> None:
    reasons = {
        f"its cache is a {kind}; served are {', '.join(_SERVED)}": kind not in _SERVED,
        "its cache is quantised; use kv_cache_dtype='auto'": getattr(spec, "kv_quant_mode", 0),
        "its cache is packed by its attention backend": _is_packed(spec),
        "one state stands for several tokens": getattr(spec, "tokens_per_state", 1) != 1,
        "its attention is not causal": getattr(spec, "non_causal", False),
        "it attends in chunks": getattr(spec, "attention_chunk_size", None),
        "it belongs to a draft model, whose KV depends on the token that follows": getattr(
            group, "is_eagle_group", False
        ),
        "its cache is not kept on the device": getattr(group, "host_resident", False)
        or not getattr(group, "enable_kv_transfer", True),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigurationError(f"{_WHERE}: layer '{layer}' cannot be served: {reason}")


def _is_packed(spec: Any) -> bool:
    slots = getattr(spec, "num_head_slots", None)
    packed = getattr(spec, "state_content_bytes", None)
    return packed is not None or slots not in {None, getattr(spec, "num_kv_heads", None)}


def _layer_numbers(names: Sequence[str]) -> dict[str, int]:
    """Returns the number of each layer by its name, or by order if names have no number."""
    digits = {
        name: [int(one) for one in re.findall(r"(?<![^.])\d+(?![^.])", name)] for name in names
    }
    told = [numbers[0] for numbers in digits.values() if len(numbers) == 1]
    if len(told) == len(names) == len(set(told)):
        return {name: numbers[0] for name, numbers in digits.items()}
    ordered = sorted(names, key=lambda name: (digits[name], name))
    return {name: number for number, name in enumerate(ordered)}
