"""A pull cut into transfers of a bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvconnect.transfer.reads import RUN, Runs

_TRANSFER_NBYTES = 8 << 20

Rows: TypeAlias = npt.NDArray[np.uint64]
"""uint64[n, 3]: address, bytes and number of the device of each run, as NIXL takes them."""


@dataclass(frozen=True, slots=True)
class Base:
    """The beginning of a region.

    Attributes:
        address: the address of its first byte, in its process or on its device.
        device: the number of its device.
        host: whether the region is in memory of the CPU.
    """

    address: int
    device: int
    host: bool


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """The runs that one transfer reads. Each remote run is as long as its local run.

    Attributes:
        local, remote: the runs of this side's memory and of the peer's.
        local_host, remote_host: whether the runs are in memory of the CPU.
    """

    local: Rows
    remote: Rows
    local_host: bool
    remote_host: bool


def transfers(local: Runs, near: Base, remote: Runs, far: Base) -> Iterator[Transfer]:
    """Cuts runs of the regions `near` and `far`, in pairs of equal length, into transfers.

    Yields the transfers in the order of the runs, each smaller than 16 MiB.
    """
    if not len(local):
        return
    if int(local["nbytes"].sum()) <= _TRANSFER_NBYTES:
        bounds = [0, len(local)]
    else:
        local, remote = _chopped(local), _chopped(remote)
        bounds = _bounds(local)
    ours, theirs = _rows(local, near), _rows(remote, far)
    for begin, end in pairwise(bounds):
        yield Transfer(ours[begin:end], theirs[begin:end], near.host, far.host)


def _rows(runs: Runs, place: Base) -> Rows:
    rows = np.empty((len(runs), 3), np.uint64)
    rows[:, 0] = runs["offset"] + np.int64(place.address)
    rows[:, 1] = runs["nbytes"]
    rows[:, 2] = place.device
    return rows


def _chopped(runs: Runs) -> Runs:
    """Returns `runs` with none larger than a transfer."""
    if int(runs["nbytes"].max()) <= _TRANSFER_NBYTES:
        return runs
    counts = -(-runs["nbytes"] // _TRANSFER_NBYTES)
    of = np.repeat(np.arange(len(runs)), counts)
    first = np.cumsum(counts) - counts
    skipped = (np.arange(len(of)) - first[of]) * _TRANSFER_NBYTES
    parts = np.empty(len(of), RUN)
    parts["offset"] = runs["offset"][of] + skipped
    parts["nbytes"] = np.minimum(runs["nbytes"][of] - skipped, _TRANSFER_NBYTES)
    return parts


def _bounds(runs: Runs) -> list[int]:
    """Returns where transfers of `runs` (`_chopped`) begin, and where the last one ends."""
    ends = np.cumsum(runs["nbytes"])
    total = int(ends[-1])
    marks = np.searchsorted(ends, np.arange(_TRANSFER_NBYTES, total, _TRANSFER_NBYTES)) + 1
    bounds: list[int] = np.unique(np.concatenate(([0], marks, [len(runs)]))).tolist()
    return bounds
