"""Copies of blocks on a CUDA device and over its link, against ceilings of the same run."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvconnect.bench.report import Figure, binary_size
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.kernels.copy import copy_blocks, gather_blocks, scatter_blocks
from kvconnect.kernels.cuda.compile.cubin_cache import CubinCache
from kvconnect.kernels.cuda.compile.nvrtc import compile_part, find_nvrtc
from kvconnect.kernels.cuda.compile.sources import CompiledPart
from kvconnect.kernels.cuda.driver.streams import copy_streams
from kvconnect.kernels.pinned import PinnedPool

_KIB, _MIB = 1 << 10, 1 << 20
_WITHIN_NBYTES = 512 * _MIB  # far beyond any second-level cache
_LINK_NBYTES = 256 * _MIB
_WITHIN_TARGETS = {32 * _KIB: 88, 16 * _KIB: 85, 4 * _KIB: 75, 512: 55}
_LINK_TARGETS = {2 * _MIB: 97, 256 * _KIB: 95, 64 * _KIB: 88, 32 * _KIB: 80, 16 * _KIB: 80}
_GEMM = 8192


def device_figures(device: torch.device, *, repeats: int) -> list[Figure]:
    """Measures copies; see `kvconnect_bench.kernels.run`. Takes about 4 GiB of device memory."""
    clock = _Clock(device, repeats)
    ceilings = _Ceilings.measured(clock)
    figures = ceilings.figures()
    for run, target in _WITHIN_TARGETS.items():
        figures += _within(run, target, ceilings, clock)
    for run, target in _LINK_TARGETS.items():
        figures += _over_the_link(run, target, ceilings, clock)
    return figures + _slowdowns(clock) + _compile_times(device)


class _Clock:
    """Times work on a stream of its own with CUDA events."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._repeats = repeats

    def seconds(self, job: Callable[[], object]) -> float:
        """Returns the median seconds of several runs, after two that warm up. Blocks."""
        with torch.cuda.stream(self.stream):
            times = [self._once(job) for _ in range(self._repeats + 2)]
        return statistics.median(times[2:])

    def _once(self, job: Callable[[], object]) -> float:
        begin, end = (_timed_event() for _ in range(2))
        begin.record(self.stream)
        job()
        end.record(self.stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Ceilings:
    """The rates of copies without gaps, in bytes per second.

    Attributes:
        within: on the device; bytes that are read and written count once.
        load, store: to and from the device, of page-locked 64 MiB.
    """

    within: float
    load: float
    store: float

    @staticmethod
    def measured(clock: _Clock) -> _Ceilings:
        here = PinnedPool(64 * _MIB).memory
        there = torch.zeros(_WITHIN_NBYTES, dtype=torch.uint8, device=clock.device)
        other = torch.zeros_like(there)
        part = there[: here.numel()]
        return _Ceilings(
            there.numel() / clock.seconds(lambda: other.copy_(there)),
            here.numel() / clock.seconds(lambda: part.copy_(here, non_blocking=True)),
            here.numel() / clock.seconds(lambda: here.copy_(part, non_blocking=True)),
        )

    def figures(self) -> list[Figure]:
        return [
            Figure("copy on the device", self.within / 1e9, "GB/s", "ceiling"),
            Figure("64 MiB to the device", self.load / 1e9, "GB/s", "ceiling"),
            Figure("64 MiB from the device", self.store / 1e9, "GB/s", "ceiling"),
        ]


def _within(run: int, target: int, ceilings: _Ceilings, clock: _Clock) -> list[Figure]:
    """Measures random blocks of one run each, out of a cache twice as large."""
    count = _WITHIN_NBYTES // run
    kv, other = _cache(2 * count, run, clock.device), _cache(2 * count, run, clock.device)
    rows = torch.zeros(count, run, dtype=torch.uint8, device=clock.device)
    ids, targets = _random_ids(2 * count, count), _random_ids(2 * count, count, seed=1)
    pairs = np.stack([ids, targets], axis=1)
    jobs: dict[str, Callable[[], object]] = {
        "gather": lambda: gather_blocks(kv, ids, rows, stream=clock.stream),
        "scatter": lambda: scatter_blocks(rows, kv, ids, stream=clock.stream),
        "copy": lambda: copy_blocks(kv, other, pairs, stream=clock.stream),
    }
    return [
        _share(
            f"on the device: {name}, runs of {binary_size(run)}",
            job,
            count * run,
            ceilings.within,
            target,
            clock,
        )
        for name, job in jobs.items()
    ]


def _over_the_link(run: int, target: int, ceilings: _Ceilings, clock: _Clock) -> list[Figure]:
    count = _LINK_NBYTES // run
    kv = _cache(2 * count, run, clock.device)
    rows = PinnedPool(count * run).memory[: count * run].view(count, run)
    ids = _random_ids(2 * count, count)
    size = binary_size(run)
    return [
        _share(
            f"to the device: {count} blocks of {size}",
            lambda: scatter_blocks(rows, kv, ids, stream=clock.stream, stable_source=True),
            count * run,
            ceilings.load,
            target,
            clock,
        ),
        _share(
            f"from the device: {count} blocks of {size}",
            lambda: gather_blocks(kv, ids, rows, stream=clock.stream),
            count * run,
            ceilings.store,
            target,
            clock,
        ),
    ]


def _share(
    name: str,
    job: Callable[[], object],
    nbytes: int,
    ceiling: float,
    target: int,
    clock: _Clock,
) -> Figure:
    share = nbytes / clock.seconds(job) / ceiling
    return Figure(name, 100 * share, "%", f">= {target} %")


def _slowdowns(clock: _Clock) -> list[Figure]:
    """Measures how much longer matrix products take while blocks are loaded beside them."""
    left, right = (
        torch.randn(_GEMM, _GEMM, dtype=torch.bfloat16, device=clock.device) for _ in range(2)
    )
    out = torch.empty_like(left)

    def products() -> None:
        for _ in range(20):
            torch.mm(left, right, out=out)

    run = 256 * _KIB
    count = _LINK_NBYTES // run
    kv = _cache(2 * count, run, clock.device)
    rows = PinnedPool(count * run).memory[: count * run].view(count, run)
    ids = _random_ids(2 * count, count)
    side = copy_streams(clock.device).load
    alone = clock.seconds(products)
    figures = []
    for path, target in (("dma", 3), ("kernel", 6)):

        def beside(path: str = path) -> None:
            side.wait_stream(clock.stream)
            # So many loads keep the link busy for longer than the products take.
            for _ in range(1 + int(alone * 40e9 * 2 / _LINK_NBYTES)):
                scatter_blocks(rows, kv, ids, stream=side, path=path, stable_source=True)
            products()

        slower = clock.seconds(beside) / alone - 1
        side.synchronize()
        figures.append(
            Figure(f"GEMM slowdown beside loads by {path}", 100 * slower, "%", f"<= {target} %")
        )
    return figures


def _compile_times(device: torch.device) -> list[Figure]:
    """Times the copy kernel's first compilation, and its load from the cache."""
    major, minor = torch.cuda.get_device_capability(device)
    part = CompiledPart("copy_runs", 16)
    with tempfile.TemporaryDirectory() as folder:
        figures = []
        for name, target in (("first compile", 600), ("from the cache", 5)):
            start = time.perf_counter()
            compile_part(part, f"sm_{major}{minor}", find_nvrtc(), CubinCache(Path(folder)))
            seconds = time.perf_counter() - start
            figures.append(Figure(f"a kernel: {name}", 1e3 * seconds, "ms", f"<= {target} ms"))
    return figures


def _cache(num_blocks: int, block_nbytes: int, device: torch.device) -> PagedKv:
    """Makes a pool of one layer whose blocks are one run of random bytes each."""
    memory = torch.randint(0, 256, (num_blocks * block_nbytes,), dtype=torch.uint8, device=device)
    tokens = max(1, block_nbytes // 1024)
    dim = block_nbytes // (4 * tokens)
    pool: Tensor = memory.view(torch.bfloat16).view(num_blocks, 1, 2, tokens, 1, dim)
    return PagedKv.from_pool(pool)


def _random_ids(
    limit: int, count: int, *, seed: int = 0
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.random.default_rng(seed).permutation(limit)[:count]
