"""The layouts of vLLM's KV cache groups, with an error for each that cannot be served."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvconnect.errors import ConfigurationError
from kvconnect.integrations.core.configuration import refuse
from kvconnect.integrations.vllm.identity import dtype_name
from kvconnect.integrations.vllm.steps import GroupOrder
from kvconnect.keys import Shard
from kvconnect.layout import KvCacheLayout, StateTensor

_WHERE = "KvConnect"
# By name: subclasses of these keep, drop or pack blocks in other ways.
_SERVED = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "MambaSpec")
# By name: the scales of others, or what they turn vectors by, are not in the page or its files.
_QUANTISED = ("FP8_PER_TENSOR", "FP8_PER_TOKEN_HEAD", "INT8_PER_TOKEN_HEAD", "NVFP4")


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """A KV cache group of vLLM.

    Attributes:
        layout: the layout of a block of this rank.
        layer_names: vLLM's names of the layers, in the order of ``layout.layer_numbers``.
        number: vLLM's number of the group.
        page_nbytes: bytes of a block of one layer, with what fills it up to vLLM's page.
    """

    layout: KvCacheLayout
    layer_names: tuple[str, ...]
    number: int = 0
    page_nbytes: int = 0


def cache_groups(kv_cache_config: Any) -> tuple[CacheGroup, ...]:
    """Returns the groups of vLLM's ``KVCacheConfig``, in its order, those of states last.

    Raises:
        ConfigurationError: a group holds something else than the keys and values of causal
            attention in the model's dtype or recurrent states, or blocks differ in their number of
            tokens.
    """
    groups = list(kv_cache_config.kv_cache_groups)
    if not all(group.layer_names for group in groups):
        raise ConfigurationError(
            f"{_WHERE}: a stage of the pipeline has no layer of one of {len(groups)} kinds; use "
            "fewer stages (pipeline_parallel_size)"
        )
    numbers = _layer_numbers([name for group in groups for name in group.layer_names])
    found = tuple(_group(group, number, numbers) for number, group in enumerate(groups))
    found = tuple(sorted(found, key=lambda one: one.layout.kind == "state"))
    if not found:
        raise ConfigurationError(f"{_WHERE}: the model has no KV cache; remove kv_transfer_config")
    sizes = sorted({one.layout.tokens_per_block for one in found})
    if len(sizes) > 1:
        raise ConfigurationError(
            f"{_WHERE}: KV cache groups have blocks of {sizes} tokens; all must have the same"
        )
    return found


def group_order(groups: Sequence[CacheGroup], *, has_drafts: bool) -> GroupOrder:
    """Returns the order of `groups`, which `cache_groups` made.

    Args:
        groups: of one rank.
        has_drafts: the engine drafts tokens.
    """
    states = tuple(one.number for one in groups if one.layout.kind == "state")
    return GroupOrder(tuple(one.number for one in groups), states, has_drafts)


def total_heads(groups: Sequence[CacheGroup], shard: Shard, model_heads: int) -> tuple[int, ...]:
    """Returns the number of KV heads of each group in the whole model; of states, that of ranks.

    Args:
        groups: the groups of one rank.
        shard: the rank.
        model_heads: the number of heads in the model's configuration.
    """
    found = []
    for group in groups:
        own, size = group.layout.num_kv_heads, shard.tp_size
        if group.layout.kind == "state":
            found.append(size)
        elif group.layout.is_latent:
            found.append(1)
        elif size == 1:
            found.append(own)
        else:
            found.append(model_heads if own == max(1, model_heads // size) else own * size)
    return tuple(found)


def _group(group: Any, number: int, numbers: Mapping[str, int]) -> CacheGroup:
    spec = _common_spec(group)
    kind = type(spec).__name__
    names = tuple(sorted(group.layer_names, key=numbers.__getitem__))
    if kind == "MambaSpec":
        return _state_group(group, spec, number, {name: numbers[name] for name in names})
    _check(group, spec, kind, names[0])
    is_latent = kind == "MLAAttentionSpec"
    heads, dims = spec.num_kv_heads, (spec.head_size, 0 if is_latent else spec.head_size_v)
    if _is_packed(spec):
        # Values and their scales, as the engine has them: no key or value ends at a half.
        half = spec.state_content_size_bytes // 2
        heads, dims = spec.num_heads, (half, half)
    window = spec.sliding_window if kind == "SlidingWindowSpec" else None
    try:
        layout = KvCacheLayout(
            num_layers=len(names),
            num_kv_heads=heads,
            key_dim=dims[0],
            value_dim=dims[1],
            tokens_per_block=spec.block_size,
            dtype=spec.dtype,
            window=window,
            layers=tuple(numbers[name] for name in names),
        )
    except ConfigurationError as error:
        raise ConfigurationError(f"{_WHERE}: layer '{names[0]}': {error} (--block-size)") from error
    return CacheGroup(layout, names, number)


def _state_group(group: Any, spec: Any, number: int, layers: Mapping[str, int]) -> CacheGroup:
    """Returns a group of recurrent states, `layers` of which are numbers by vLLM's names."""
    name = next(iter(layers))
    _refuse(
        {
            "vLLM keeps no snapshots of its states; set enable_prefix_caching, and "
            "mamba_cache_mode='align' if it is given": spec.mamba_cache_mode != "align",
            **_not_on_device(group),
        },
        name,
    )
    # The tensors of a page as vLLM has them, one after the other without gaps.
    tensors = ", ".join(
        f"{dtype_name(dtype)}{list(shape)}"
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    )
    kind = str(getattr(spec.mamba_type, "name", spec.mamba_type))
    shape, name = (int(spec.state_content_size_bytes),), f"{kind}: {tensors}"
    states = [StateTensor(layer, name, shape, torch.uint8) for layer in layers.values()]
    layout = KvCacheLayout.of_states(states, spec.block_size)
    if layout.layer_nbytes > spec.page_size_bytes:
        raise ConfigurationError(
            f"{_WHERE}: states of {shape[0]} bytes do not lie in pages of {spec.page_size_bytes} "
            f"bytes that {spec.block_size} tokens divide evenly; set --block-size to 16"
        )
    return CacheGroup(layout, tuple(layers), number, int(spec.page_size_bytes))


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
        f"its cache is quantised as {_quantised_as(spec)}; served are {', '.join(_QUANTISED)}, and "
        "kv_cache_dtype='auto'": _quantised_as(spec) not in ("", *_QUANTISED),
        "its cache is packed by its attention backend": _is_packed(spec)
        and not _is_packed_in_bytes(spec, kind),
        "one state stands for several tokens": getattr(spec, "tokens_per_state", 1) != 1,
        "its attention is not causal": getattr(spec, "non_causal", False),
        "it attends in chunks": getattr(spec, "attention_chunk_size", None),
        **_not_on_device(group),
    }
    _refuse(reasons, layer)


def _not_on_device(group: Any) -> dict[str, bool]:
    is_elsewhere = getattr(group, "host_resident", False)
    return {
        "its cache is not kept on the device": is_elsewhere
        or not getattr(group, "enable_kv_transfer", True)
    }


def _refuse(reasons: Mapping[str, object], layer: str) -> None:
    where = f"{_WHERE}: layer '{layer}' cannot be served"
    refuse({f"{where}: {reason}": applies for reason, applies in reasons.items()})


def _quantised_as(spec: Any) -> str:
    """Returns the name of the quantisation of the cache; ``""`` if there is none."""
    mode = getattr(spec, "kv_quant_mode", 0)
    return str(getattr(mode, "name", mode)) if mode else ""


def _is_packed_in_bytes(spec: Any, kind: str) -> bool:
    """Returns whether a token's values and their scales lie together, as bytes."""
    return (
        bool(_quantised_as(spec))
        and kind != "MLAAttentionSpec"
        and spec.dtype.itemsize == 1
        and spec.state_content_size_bytes % 2 == 0
    )


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
