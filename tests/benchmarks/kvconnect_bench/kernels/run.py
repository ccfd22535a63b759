"""Measures the copies of blocks, as shares of what the machine can do."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvconnect.bench.report import Figure
from kvconnect_bench.kernels.device import device_figures
from kvconnect_bench.kernels.host import host_figures

SKIPPED = (
    "no CUDA device here: copies on a device and over the host link, quantising on a device, the "
    "slowdown of GEMMs and compile times were skipped"
)


def kernels(
    *, nbytes: int, repeats: int, tell: Callable[[str], None] = lambda _: None
) -> list[Figure]:
    """Measures the copies on the host, and on the current CUDA device if there is one. Blocks.

    Args:
        nbytes: copied in one measurement on the host; should be beyond the processor's caches.
        repeats: of each measurement; the figures are medians.
        tell: called with a sentence about what was skipped.
    """
    figures = host_figures(nbytes=nbytes, repeats=repeats)
    if torch.cuda.is_available():
        return figures + device_figures(torch.device("cuda"), repeats=repeats)
    tell(SKIPPED)
    return figures
