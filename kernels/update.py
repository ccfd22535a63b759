"""Updates a linear cache with new keys and values; `reshape_and_cache` is for a paged one."""

from __future__ import annotations

from enum import Enum
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from kvconnect.errors import ConfigurationError, nearest
from kvconnect.kernels.append import reshape_and_cache
from kvconnect.kernels.blocks.update_checks import check_memory, check_shapes, check_values
from kvconnect.kernels.blocks.work import UpdateWork
from kvconnect.kernels.fallback import tried
from kvconnect.kernels.host import reference, tokens
from kvconnect.kernels.library import register

__all__ = ["AttentionIOForm", "KVCacheMode", "kv_cache_update", "reshape_and_cache"]


class AttentionIOForm(Enum):
    """The form of new keys or values: padded ``[B, N, S_new, H]``, or packed ``[tokens, N, H]``.

    Names with ``k`` are TensorRT's names in C++, the others its names in Python.
    """

    PADDED_BHND = "padded_bhnd"
    PACKED_NHD = "packed_nhd"
    kPADDED_BHND = PADDED_BHND  # noqa: N815
    kPACKED_NHD = PACKED_NHD  # noqa: N815


class KVCacheMode(Enum):
    """The mode of cache updates: tokens are written one after the other from an index on."""

    LINEAR = "linear"
    kLINEAR = LINEAR  # noqa: N815


_Kind = TypeVar("_Kind", AttentionIOForm, KVCacheMode)


def _names(kind: type[_Kind]) -> dict[str, _Kind]:
    return {name: one for one in kind for name in (one.value, one.name, f"k{one.name}")}


_FORMS = _names(AttentionIOForm)
_MODES = _names(KVCacheMode)


def _update_form_of(given: object) -> AttentionIOForm:
    """Returns the form that `given` names.

    Args:
        given: an `AttentionIOForm`, a member of TensorRT's enum, or the name of a form:
            ``"padded_bhnd"``, ``"PADDED_BHND"``, ``"kPADDED_BHND"``.

    Raises:
        ConfigurationError: there is no such form; the message names the nearest.
    """
    return _FORMS.get(_name(given)) or _unknown("update_form", given, AttentionIOForm)


def _cache_mode_of(given: object) -> KVCacheMode:
    """Returns the mode that `given` names, as `_update_form_of` does.

    Raises:
        ConfigurationError: there is no such mode; the message names the nearest.
    """
    return _MODES.get(_name(given)) or _unknown("cache_mode", given, KVCacheMode)


def _name(given: object) -> str:
    # Members of the enums in TensorRT's binding have names, of whatever class they are.
    return given if isinstance(given, str) else str(getattr(given, "name", given))


def _unknown(field: str, given: object, kind: type[Enum]) -> NoReturn:
    hint = nearest(_name(given), [one.value for one in kind])
    raise ConfigurationError(f"{field}={given!r}: {hint}")


def kv_cache_update(
    cache: Tensor,
    update: Tensor,
    write_indices: Tensor,
    update_lengths: Tensor | None = None,
    *,
    update_form: AttentionIOForm | str = "padded_bhnd",
    cache_mode: KVCacheMode | str = "linear",
    out: Tensor | None = None,
) -> Tensor:
    """Writes new keys (or values) into a linear cache, in place: TensorRT's IKVCacheUpdateLayer.

    ``cache[i, :, write_indices[i] + s, :] = update[i, :, s, :]``, and all else is unchanged. On a
    device the work is enqueued on the current stream. The op can be traced and exported.

    Args:
        cache: ``[B, N, S_max, H]``, float64, float32, float16, bfloat16 or a type of one byte; any
            strides, but for a contiguous last axis.
        update: of the cache's dtype; ``[B, N, S_new, H]``, or packed ``[total_tokens, N, H]``.
        write_indices: ``[B]`` int32 or int64, where each sequence's update begins; on the cache's
            device or the host.
        update_lengths: for a packed update only: ``[B + 1]``, where each sequence begins in
            `update`, and the end: from 0 to ``total_tokens``, never decreasing.
        update_form: ``"padded_bhnd"`` or ``"packed_nhd"``, or TensorRT's enum or name of it.
        cache_mode: ``"linear"``, or TensorRT's enum or name of it; there is no other yet.
        out: the tensor for the result; only `cache` itself is possible.

    Returns:
        `cache`.

    Raises:
        TypeError: wrong dtypes.
        ValueError: wrong shapes, `update_form`, `cache_mode` or `out`; packed without lengths, or
            lengths that do not start at 0, decrease, or do not end at ``total_tokens``.
        IndexError: with indices on the host, a sequence's update begins before 0 or ends beyond
            ``S_max``. (With indices on a device, such a sequence is not written, and is counted in
            the device's error word.)
        RuntimeError: devices differ. Nothing was written.
    """
    _cache_mode_of(cache_mode)
    form = _update_form_of(update_form)
    packed = form is AttentionIOForm.PACKED_NHD
    if packed != (update_lengths is not None):
        raise ConfigurationError(
            f"update_lengths: {'needed' if packed else 'not possible'} with '{form.value}'"
        )
    if out is not None and out is not cache and not _same_memory(out, cache):
        raise ConfigurationError(
            "out: must be the cache's own memory, as the update is made in place"
        )
    _update(cache, update, write_indices, update_lengths)
    return cache


def _same_memory(out: Tensor, cache: Tensor) -> bool:
    if torch.compiler.is_compiling():
        return False  # addresses cannot be traced
    return (
        out.data_ptr() == cache.data_ptr()
        and out.device == cache.device
        and (out.shape, out.stride(), out.dtype) == (cache.shape, cache.stride(), cache.dtype)
    )


@register("kv_cache_update", changes="cache", fake=check_shapes)
def _update(
    cache: Tensor, update: Tensor, write_indices: Tensor, update_lengths: Tensor | None
) -> None:
    check_shapes(cache, update, write_indices, update_lengths)
    check_memory(cache, update)
    packed = update_lengths is not None
    length = update.shape[0 if packed else 2]
    # Values on a device are not read: that would wait for it.
    starts = write_indices.tolist() if write_indices.is_cpu else None
    ends = update_lengths.tolist() if update_lengths is not None and update_lengths.is_cpu else None
    if starts is not None and packed == (ends is not None):
        check_values(starts, ends, length, cache.shape[2])
    if not length or not cache.numel():
        return
    if update.stride(-1) != 1:
        update = update.contiguous()
    indices = write_indices, update_lengths
    if tried(cache.device, lambda device: device.update(UpdateWork(cache, update, *indices))):
        return
    starts = write_indices.tolist() if starts is None else starts
    ends = update_lengths.tolist() if update_lengths is not None else None
    check_values(starts, ends, length, cache.shape[2])
    way = tokens if cache.is_cpu else reference
    if ends is None:
        way.update_padded(cache, update, starts)
    else:
        way.update_packed(cache, update, starts, ends)
