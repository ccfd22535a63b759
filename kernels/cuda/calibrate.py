"""Finding out, on a device, from which size on DMA is the faster way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np
import torch

from kvconnect.kernels.blocks.runs import RunTable
from kvconnect.kernels.blocks.strips import Side, Strip
from kvconnect.kernels.blocks.work import BlockCopy, End
from kvconnect.kernels.cuda.copy_policy import CopyPolicy, Direction, Route
from kvconnect.kernels.cuda.device import DeviceWork

__all__ = ["SIZES", "Seconds", "find_thresholds", "measure_on"]

SIZES: Final = tuple(size << 10 for size in (4, 8, 12, 16, 20, 24, 28, 32, 48, 64, 96, 128, 256))
"""Bytes of a run that are tried, ascending."""

Seconds = Callable[[Direction, Route, int], float]
"""How long so many bytes take in runs of one size, by one way; the same bytes for all sizes."""

_TOTAL: Final = 64 << 20
_ROUNDS: Final = 5


def find_thresholds(policy: CopyPolicy, seconds: Seconds) -> CopyPolicy:
    """`policy` with the smallest sizes from which on DMA is never slower than the other way.

    Where it always is slower, the threshold is twice the largest size that was tried.
    """
    load = _threshold(Direction.LOAD, Route.KERNEL, seconds)
    store = _threshold(Direction.STORE, Route.STAGED, seconds)
    return replace(policy, load_dma_from=load, store_dma_from=store)


def _threshold(direction: Direction, other: Route, seconds: Seconds) -> int:
    best = 2 * SIZES[-1]
    for size in reversed(SIZES):
        if seconds(direction, Route.DMA, size) > seconds(direction, other, size):
            break
        best = size
    return best


def measure_on(work: DeviceWork, device: torch.device) -> Seconds:
    """Measures with 64 MiB in runs at random offsets, on a stream of its own, the best of five."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    there = torch.zeros(2 * _TOTAL, dtype=torch.uint8, device=device)
    here = torch.zeros(2 * _TOTAL, dtype=torch.uint8, pin_memory=True)
    torch.cuda.synchronize(device)

    def seconds(direction: Direction, route: Route, run_nbytes: int) -> float:
        ends = (here, there) if direction is Direction.LOAD else (there, here)
        copy = _scattered(*ends, run_nbytes)
        times = []
        for _ in range(_ROUNDS + 1):  # the first one compiles and uploads
            begin = stream.record_event(_timed())
            work.copy(copy, stream, route.value)
            end = stream.record_event(_timed())
            end.synchronize()
            times.append(float(begin.elapsed_time(end)) / 1e3)
        return min(times[1:])

    return seconds


def _timed() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _scattered(source: torch.Tensor, target: torch.Tensor, run_nbytes: int) -> BlockCopy:
    # Every other run's length of either side, in random order: nothing can be merged.
    count = _TOTAL // run_nbytes
    random = np.random.default_rng(0)
    strip = Strip(Side(0, 0, 2 * run_nbytes), Side(0, 0, 2 * run_nbytes), 1, run_nbytes, run_nbytes)
    return BlockCopy(
        table=RunTable([strip]),
        source=End(
            source.data_ptr(), random.permutation(count), count, source.device, source.is_pinned()
        ),
        target=End(
            target.data_ptr(), random.permutation(count), count, target.device, target.is_pinned()
        ),
        num_tokens=None,
        nbytes=count * run_nbytes,
        stable_source=True,
        keep=(source, target),
    )
