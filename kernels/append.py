"""Appends new keys and values to a paged cache, each token at its slot."""

from __future__ import annotations

import torch
from torch import Tensor

from kvconnect.errors import ConfigurationError
from kvconnect.kernels.blocks.block_ids import (
    Unpadded,
    check_integers,
    check_targets,
    host_ids,
    unpadded,
)
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.kernels.blocks.work import AppendWork
from kvconnect.kernels.cuda.device import tried
from kvconnect.kernels.host import reference
from kvconnect.kernels.host.tokens import append
from kvconnect.kernels.library import register


def reshape_and_cache(
    key: Tensor, value: Tensor | None, kv: PagedKv, slot_mapping: Tensor, *, layer: int
) -> None:
    """Writes new keys and values of one layer, each token's at its slot.

    On a device the work is enqueued on the current stream. The op can be traced and exported.

    Args:
        key: ``[tokens, heads, key_dim]`` of the cache's dtype, with a contiguous last axis.
        value: ``[tokens, heads, value_dim]``; ``None`` for a cache without values.
        kv: the cache; changed.
        slot_mapping: ``[tokens]`` int32 or int64, on the cache's device or the host: block times T
            plus token of the block; distinct. Tokens of slot -1 are skipped.
        layer: counts the layers of `kv` from 0.

    Raises:
        TypeError: wrong dtypes.
        ValueError: wrong shapes, or a slot that is given twice.
        IndexError: there is no such layer, or a slot on the host is out of range. (Such slots on
            the device are skipped, and counted in the device's error word.)
        RuntimeError: devices differ. Nothing was written.
    """
    if not 0 <= layer < kv.num_layers:
        raise IndexError(f"layer: {layer} is outside 0..{kv.num_layers - 1}")
    if torch.compiler.is_compiling():
        planes = kv.layer_views(range(layer, layer + 1))
        _append(key, value, planes, slot_mapping, kv.layout)
        return
    states = _checked_states(key, value, kv, slot_mapping)
    if not slot_mapping.shape[0]:
        return
    slots = _checked_slots(slot_mapping, kv.num_blocks * kv.tokens) if slot_mapping.is_cpu else None
    if tried(kv.device, lambda device: device.append(AppendWork(states, kv, layer, slot_mapping))):
        return
    if slots is not None and kv.device.type == "cpu":
        append(states, kv, slots, layer)
        return
    for state, view in zip(states, kv.layer_views(range(layer, layer + 1)), strict=True):
        plane = view if kv.layout == "NHD" else view.transpose(1, 2)
        reference.append(state, plane, slot_mapping)


def _checked_states(
    key: Tensor, value: Tensor | None, kv: PagedKv, slots: Tensor
) -> tuple[Tensor, ...]:
    check_integers("slot_mapping", slots)
    if slots.ndim != 1:
        raise ConfigurationError(f"slot_mapping: {tuple(slots.shape)}; one axis is needed")
    if kv.per_layer == 1 and value is not None and value.numel():
        raise ConfigurationError("value: the cache has no values; give None")
    if kv.per_layer == 2 and value is None:
        raise ConfigurationError("value: None, but the cache has values")
    count, device_ = slots.shape[0], kv.device
    states = (key,) if kv.per_layer == 1 or value is None else (key, value)
    dims, dtype = (kv.key_dim, kv.value_dim), kv.dtype
    in_rows = True
    for name, state, dim in zip(("key", "value"), states, dims, strict=False):
        if state.dtype != dtype:
            raise TypeError(f"{name}: {state.dtype}, the cache is {kv.dtype}")
        if state.device != device_:
            raise RuntimeError(f"{name}: on {state.device}, the cache is on {device_}")
        if state.shape != (count, kv.heads, dim):
            raise ConfigurationError(
                f"{name}: {tuple(state.shape)}; {(count, kv.heads, dim)} is needed"
            )
        in_rows = in_rows and state.stride(2) == 1
    if not slots.is_cpu and slots.device != device_:
        raise RuntimeError(f"slot_mapping: on {slots.device}, the cache is on {kv.device}")
    return states if in_rows else tuple(state.contiguous() for state in states)


def _checked_slots(slot_mapping: Tensor, limit: int) -> Unpadded:
    slots = unpadded(host_ids("slot_mapping", slot_mapping, limit, noun="slot "))
    check_targets("slot_mapping", slots.ids, noun="slot ")
    return slots


@register("reshape_and_cache", changes="planes")
def _append(
    key: Tensor, value: Tensor | None, planes: list[Tensor], slot_mapping: Tensor, layout: str
) -> None:
    kv = PagedKv.from_views(planes, layout=layout, per_layer=len(planes))
    reshape_and_cache(key, value, kv, slot_mapping, layer=0)
