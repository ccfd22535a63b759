"""The pieces that a pull reads, all of one size, and the runs that neighbouring pieces form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvconnect.errors import ConfigurationError

Offsets: TypeAlias = npt.NDArray[np.int64]
RUN = np.dtype([("offset", "<i8"), ("nbytes", "<i8")])
"""Contiguous bytes of one region."""
Runs: TypeAlias = npt.NDArray[np.void]
"""An array of `RUN`, in the order of the stream of bytes that they make."""


@dataclass(frozen=True, slots=True, eq=False)
class Reads:
    """The equal pieces of one remote region, and their destinations in one local region.

    Pieces may have any offsets and any order. Local pieces must not overlap, or their contents are
    undefined. Pieces of several sizes need several `Reads`.

    Attributes:
        remote_region: number that the peer's `Transport.register` returned.
        remote_offsets: int64[n], bytes from the region's begin.
        local_region: number that this side's `Transport.register` returned.
        local_offsets: int64[n], bytes.
        nbytes: the size of each piece.
        epoch: the epoch of the lease under which they are read; 0 without a lease. A transport's
            checksums cover it.

    Raises:
        ConfigurationError: an array is not one-dimensional and integer, the two differ in length,
            or a number is negative.
    """

    remote_region: int
    remote_offsets: Offsets
    local_region: int
    local_offsets: Offsets
    nbytes: int
    epoch: int = 0

    def __post_init__(self) -> None:
        for field in ("remote_region", "local_region", "epoch"):
            if getattr(self, field) < 0:
                raise ConfigurationError(f"{field}={getattr(self, field)}: must be >= 0")
        if self.nbytes < 1:
            raise ConfigurationError(f"nbytes={self.nbytes}: a piece has at least one byte")
        for field in ("remote_offsets", "local_offsets"):
            object.__setattr__(self, field, _offsets(field, getattr(self, field)))
        if len(self.remote_offsets) != len(self.local_offsets):
            raise ConfigurationError(
                f"remote_offsets has {len(self.remote_offsets)} pieces and local_offsets"
                f" {len(self.local_offsets)}: each piece needs one of both"
            )

    @property
    def total_nbytes(self) -> int:
        """Bytes of all pieces."""
        return self.nbytes * len(self.local_offsets)


def _offsets(field: str, value: Any) -> Offsets:
    array = np.asarray(value)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ConfigurationError(
            f"{field} has shape {array.shape} and dtype {array.dtype}: must be int64[n]"
        )
    whole = np.array(array, np.int64)  # a copy: the caller may use its array for the next reads
    if len(whole) and int(whole.min()) < 0:
        raise ConfigurationError(f"{field} has {int(whole.min())}: offsets are >= 0")
    return whole


def _merged(broken: npt.NDArray[np.bool_], nbytes: int) -> tuple[Offsets, Offsets]:
    """Returns the first piece of each run and the bytes of the run.

    `broken[i]` means that piece i + 1 begins a run.
    """
    begins = np.concatenate(([0], np.flatnonzero(broken) + 1))
    counts = np.diff(begins, append=len(broken) + 1)
    return begins, counts * nbytes


def runs(offsets: Offsets, nbytes: int) -> Runs:
    """Returns the runs of pieces of `nbytes` at `offsets`; adjacent pieces form one."""
    found = np.empty(0, RUN)
    if len(offsets):
        begins, sizes = _merged(np.diff(offsets) != nbytes, nbytes)
        found = np.empty(len(begins), RUN)
        found["offset"], found["nbytes"] = offsets[begins], sizes
    return found


def pairs(reads: Reads) -> tuple[Runs, Runs]:
    """Returns the remote and the local runs of `reads`, in pairs of equal length.

    Pieces that are adjacent on both sides form one run.
    """
    if not len(reads.local_offsets):
        return np.empty(0, RUN), np.empty(0, RUN)
    far, near = reads.remote_offsets, reads.local_offsets
    broken = (far[1:] - far[:-1] != reads.nbytes) | (near[1:] - near[:-1] != reads.nbytes)
    sizes: Offsets | int = reads.nbytes
    if not broken.all():
        begins, sizes = _merged(broken, reads.nbytes)
        far, near = far[begins], near[begins]
    remote, local = np.empty(len(far), RUN), np.empty(len(far), RUN)
    remote["offset"], remote["nbytes"] = far, sizes
    local["offset"], local["nbytes"] = near, sizes
    return remote, local


def cut(whole: Runs, begin: int, end: int) -> Runs:
    """Returns the runs of bytes `begin` to `end` (0 <= begin < end <= total) of their stream."""
    ends = np.cumsum(whole["nbytes"])
    first = int(np.searchsorted(ends, begin, side="right"))
    last = int(np.searchsorted(ends, end, side="left"))
    part = whole[first : last + 1].copy()
    part["nbytes"][-1] -= int(ends[last]) - end
    skipped = begin - (int(ends[first]) - int(whole["nbytes"][first]))
    part["offset"][0] += skipped
    part["nbytes"][0] -= skipped
    return part


def pieces(whole: Runs, size: int) -> Iterator[Runs]:
    """Yields the runs of each `size` bytes of their stream, in order; the last may have fewer."""
    ends = np.cumsum(whole["nbytes"])
    total = int(ends[-1])
    cuts = np.arange(0, total, size)
    begins = np.union1d(ends - whole["nbytes"], cuts)
    index = np.searchsorted(ends, begins, side="right")
    parts = np.empty(len(begins), RUN)
    parts["offset"] = whole["offset"][index] + begins - (ends - whole["nbytes"])[index]
    parts["nbytes"] = np.diff(begins, append=total)
    places = [*np.searchsorted(begins, cuts).tolist(), len(parts)]
    for first, last in pairwise(places):
        yield parts[first:last]
