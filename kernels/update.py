"""Updates a linear cache with new keys and values; `reshape_and_cache` is for a paged one."""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

import torch
from torch import Tensor

from kvconnect.errors import ConfigurationError, nearest
from kvconnect.kernels.append import reshape_and_cache
from kvconnect.kernels.blocks.block_ids import check_integers
from kvconnect.kernels.blocks.extents import overlap, shares_elements
from kvconnect.kernels.blocks.work import UpdateWork
from kvconnect.kernels.cuda.device import tried
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


_Kind = TypeVar("_Kind", bound=Enum)


def _names(kind: type[_Kind]) -> dict[str, _Kind]:
    return {name: one for one in kind for name in (one.value, one.name, f"k{one.name}")}


_FORMS = _names(AttentionIOForm)
_MODES = _names(KVCacheMode)


def _named(members: dict[str, _Kind], field: str, given: object) -> _Kind:
    """Returns the one of `members` that `given` names: a member of theirs or of TensorRT's enum.

    Raises:
        ConfigurationError: there is none for argument `field`; the message names the nearest.
    """
    # Members of the enums in TensorRT's binding have names, of whatever class they are.
    name = given if isinstance(given, str) else str(getattr(given, "name", given))
    found = members.get(name)
    if found is None:
        hint = nearest(name, list(dict.fromkeys(one.value for one in members.values())))
        raise ConfigurationError(f"{field}={given!r}: {hint}")
    return found


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
    _named(_MODES, "cache_mode", cache_mode)
    form = _named(_FORMS, "update_form", update_form)
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


_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


class OutsideCache(ConfigurationError, IndexError):
    """The error of a sequence's update that begins before the cache or ends beyond it."""


def check_shapes(
    cache: Tensor, update: Tensor, write_indices: Tensor, update_lengths: Tensor | None
) -> None:
    """Checks dtypes, shapes and devices, for which no values are needed.

    Raises:
        TypeError, ValueError, RuntimeError: as `kv_cache_update`.
    """
    if cache.dtype not in _DTYPES and cache.element_size() != 1:
        raise TypeError(f"cache: {cache.dtype}; floats of 16 to 64 bits or single bytes are needed")
    if update.dtype != cache.dtype:
        raise TypeError(f"update: {update.dtype}, the cache is {cache.dtype}")
    if update.device != cache.device:
        raise RuntimeError(f"update: on {update.device}, the cache is on {cache.device}")
    if cache.ndim != 4:
        raise ConfigurationError(f"cache: {tuple(cache.shape)} must be [B, N, S_max, H]")
    batch, heads, _, dim = cache.shape
    if update_lengths is None:
        if update.ndim != 4 or (update.shape[0], update.shape[1], update.shape[3]) != (
            batch,
            heads,
            dim,
        ):
            raise ConfigurationError(
                f"update: {tuple(update.shape)} must be {(batch, heads, 'S_new', dim)}"
            )
    else:
        if update.ndim != 3 or update.shape[1:] != (heads, dim):
            raise ConfigurationError(
                f"update: {tuple(update.shape)} must be {('total_tokens', heads, dim)}"
            )
        _check_index("update_lengths", update_lengths, batch + 1, cache)
    _check_index("write_indices", write_indices, batch, cache)


def _check_index(name: str, index: Tensor, length: int, cache: Tensor) -> None:
    check_integers(name, index)
    if index.ndim != 1 or index.shape[0] != length:
        raise ConfigurationError(f"{name}: {tuple(index.shape)} must be ({length},)")
    if index.device != cache.device and index.device.type != "cpu":
        raise RuntimeError(f"{name}: on {index.device}, the cache is on {cache.device}")


def check_memory(cache: Tensor, update: Tensor) -> None:
    """Checks that rows of `cache` are contiguous, share no memory, and do not overlap `update`.

    Raises:
        ValueError: one of these is not so.
    """
    strides, shape = cache.stride(), cache.shape
    if strides[3] != 1 and shape[3] > 1:
        raise ConfigurationError(f"cache: strides {strides}: the last axis must be contiguous")
    if not cache.is_contiguous() and shares_elements(cache):
        raise ConfigurationError(f"cache: strides {strides} make elements share memory")
    if overlap(cache, update):
        raise ConfigurationError("update: shares memory with the cache")


def check_values(
    write_indices: list[int], lengths: list[int] | None, total: int, max_length: int
) -> None:
    """Checks that each sequence's update fits into the cache.

    Args:
        write_indices: where each sequence's update begins in the cache.
        lengths: the cumulative lengths; ``None`` if each sequence's update has `total` tokens.
        total: the tokens of the update.
        max_length: the tokens that the cache holds of each sequence.

    Raises:
        ValueError: `lengths` do not start at 0, decrease, or do not end at `total`; or an update
            does not fit. The latter is `OutsideCache`, an ``IndexError``, too.
    """
    if lengths is None:
        if write_indices and (min(write_indices) < 0 or max(write_indices) + total > max_length):
            for index, start in enumerate(write_indices):
                _check_fit(index, start, total, max_length)
        return
    if lengths[0] != 0 or lengths[-1] != total:
        raise ConfigurationError(
            f"update_lengths: from {lengths[0]} to {lengths[-1]}; must be from 0 to {total}, the "
            "tokens of the update"
        )
    for index, start in enumerate(write_indices):
        length = lengths[index + 1] - lengths[index]
        if length < 0:
            raise ConfigurationError(
                f"update_lengths: {lengths[index + 1]} after {lengths[index]}; they must not "
                "decrease"
            )
        _check_fit(index, start, length, max_length)


def _check_fit(index: int, start: int, length: int, max_length: int) -> None:
    if start < 0 or start + length > max_length:
        raise OutsideCache(
            f"write_indices[{index}]: {length} tokens from {start} on do not fit into a cache of "
            f"{max_length}"
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
