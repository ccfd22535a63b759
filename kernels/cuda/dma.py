"""Describes copies for the copy engines: adjacent runs are merged, and submitted in batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvconnect.kernels.blocks.work import BlockCopy
from kvconnect.kernels.cuda.driver.interface import MAX_BATCH, AccessOrder, Descriptors, Driver


def describe(copy: BlockCopy) -> Descriptors:
    """Returns all runs of all pairs, as few as possible, in the order of their targets.

    Args:
        copy: a copy whose ids are on the host.
    """
    source, target, runs = copy.source, copy.target, copy.table.runs
    sources = source.address + runs["source_offset"] + source.ids[:, None] * runs["source_step"]
    targets = target.address + runs["target_offset"] + target.ids[:, None] * runs["target_step"]
    if copy.num_tokens is None:
        sizes = np.broadcast_to(runs["nbytes"], sources.shape)
    else:
        tokens = copy.num_tokens[:, None] - runs["first_token"]
        sizes = np.clip(tokens * runs["token_nbytes"], 0, runs["nbytes"])
    return _merged(Descriptors(sources.ravel(), targets.ravel(), sizes.ravel()))


def _merged(runs: Descriptors) -> Descriptors:
    sources, targets, sizes = runs.sources, runs.targets, runs.sizes
    if sizes.size and not sizes.min():
        there = np.flatnonzero(sizes)
        sources, targets, sizes = sources[there], targets[there], sizes[there]
    if sizes.size < 2:
        return Descriptors(sources, targets, np.ascontiguousarray(sizes))
    # The copies of a batch have no order, so they are sorted to make neighbours adjacent.
    if (targets[1:] < targets[:-1]).any():
        order = np.argsort(targets)
        sources, targets, sizes = sources[order], targets[order], sizes[order]
    goes_on = (sources[:-1] + sizes[:-1] == sources[1:]) & (
        targets[:-1] + sizes[:-1] == targets[1:]
    )
    starts = np.concatenate(([0], np.flatnonzero(~goes_on) + 1))
    return Descriptors(sources[starts], targets[starts], np.add.reduceat(sizes, starts))


def submit(driver: Driver, descriptors: Descriptors, order: AccessOrder, stream: Any) -> None:
    """Submits all `descriptors` to `stream`, in as few batches as allowed. Does not block.

    Raises:
        DriverError: the batches before the refused one were submitted.
    """
    for start in range(0, len(descriptors), MAX_BATCH):
        driver.copy_batch(descriptors.part(start, start + MAX_BATCH), order, stream)


def cut(descriptors: Descriptors, max_nbytes: int) -> Iterator[Descriptors]:
    """Yields the copies of `descriptors` in portions of at most `max_nbytes`; cuts long runs."""
    pieces = -(-descriptors.sizes // max_nbytes)
    index = np.repeat(np.arange(len(descriptors)), pieces)
    within = np.arange(len(index)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    skip = within * max_nbytes
    sizes = np.minimum(descriptors.sizes[index] - skip, max_nbytes)
    cut_up = Descriptors(
        descriptors.sources[index] + skip, descriptors.targets[index] + skip, sizes
    )
    ends = np.cumsum(sizes)
    start = 0
    while start < len(sizes):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + max_nbytes, side="right"))
        yield cut_up.part(start, stop)
        start = stop
