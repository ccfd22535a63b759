"""Checks the arguments of `kv_cache_update`, before anything is written."""

from __future__ import annotations

import torch
from torch import Tensor

from kvconnect.errors import ConfigurationError
from kvconnect.kernels.blocks.block_ids import check_integers
from kvconnect.kernels.blocks.extents import overlap, shares_elements

__all__ = ["OutsideCache", "check_memory", "check_shapes", "check_values"]

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
