"""Checks block ids as callers give them, before anything is copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvconnect.errors import ConfigurationError

Ids: TypeAlias = npt.NDArray[np.int64]
"""Block ids on the host: 1-D int64, contiguous."""

BlockIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer] | Tensor
"""Integers, -1 for padding: a sequence, a NumPy array or a tensor."""

_INDEX_DTYPES = {torch.int32, torch.int64}

SMALL = 64
"""Up to so many ids, Python's own functions are faster than NumPy's."""


class Unpadded(NamedTuple):
    """The ids that are not padding, and their positions in the full list.

    Attributes:
        ids, positions: ``[n]`` int64.
        in_order: whether the positions are 0 to n - 1.
    """

    ids: Ids
    positions: Ids
    in_order: bool


def on_device(ids: object) -> TypeGuard[Tensor]:
    """Returns whether `ids` is a tensor on a device, whose values cannot be read without a wait."""
    return isinstance(ids, Tensor) and not ids.is_cpu


def host_ids(
    name: str,
    ids: BlockIds,
    limit: int,
    *,
    ndim: int = 1,
    padding: bool = True,
    noun: str = "block ",
) -> Ids:
    """Checks `ids` and returns them as a contiguous int64 array; copies only if needed.

    Args:
        name: the argument's name, for messages.
        ids: the ids that the caller gave, on the host.
        limit: valid ids are 0 to `limit` - 1, and -1 with `padding`.
        ndim: the number of dimensions that `ids` must have.
        padding: whether -1 is allowed.
        noun: the word before an id in messages.

    Raises:
        TypeError: `ids` are not integers.
        ValueError: `ids` are on a device, or not of `ndim` dimensions.
        IndexError: an id is out of range.
    """
    if on_device(ids):
        raise ConfigurationError(f"{name}: must be on the host; call cpu() on it")
    array = ids.numpy() if isinstance(ids, Tensor) else np.asarray(ids)
    if array.size == 0:
        shape = (0,) if ndim == 1 else (0, 2)
        return np.empty(shape, np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name}: integers are needed, these are {array.dtype}")
    if array.ndim != ndim:
        raise ConfigurationError(f"{name}: shape {array.shape}; {ndim} dimensions are needed")
    if array.size <= SMALL:
        values = (array if ndim == 1 else array.ravel()).tolist()
        low, high = min(values), max(values)
    else:
        low, high = int(array.min()), int(array.max())
    if low < (-1 if padding else 0) or high >= limit:
        wrong = low if low < (-1 if padding else 0) else high
        raise IndexError(f"{name}: {noun}{wrong} is outside 0..{limit - 1}")
    return np.ascontiguousarray(array, np.int64)


def unpadded(ids: Ids) -> Unpadded:
    """Returns `ids` without the padding, -1."""
    count = len(ids)
    if count <= SMALL:
        if -1 not in ids.tolist():
            return Unpadded(ids, _COUNTS[count], in_order=True)
    elif int(ids.min()) >= 0:
        return Unpadded(ids, np.arange(count), in_order=True)
    positions = np.flatnonzero(ids >= 0)
    return Unpadded(
        ids[positions], positions, bool(len(positions) == 0 or positions[-1] == len(positions) - 1)
    )


def check_targets(name: str, ids: Ids, *, noun: str = "block ") -> None:
    """Checks that no id is in `ids` twice, so that no block is written to twice.

    Raises:
        ValueError: an id is there twice.
    """
    if len(ids) <= SMALL:
        values = ids.tolist()
        if len(set(values)) == len(values):
            return
    ordered = np.sort(ids)
    if (twice := ordered[:-1][ordered[1:] == ordered[:-1]]).size:
        raise ConfigurationError(f"{name}: {noun}{twice[0]} is given twice")


_COUNTS = [np.arange(count) for count in range(SMALL + 1)]


def check_integers(name: str, ids: Tensor) -> None:
    """Raises TypeError unless the tensor `ids` is of int32 or int64."""
    if ids.dtype not in _INDEX_DTYPES:
        raise TypeError(f"{name}: int32 or int64 is needed, this is {ids.dtype}")
