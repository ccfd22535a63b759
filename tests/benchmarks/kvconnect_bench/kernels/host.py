"""Copies of blocks in host memory, against one memcpy of the same bytes."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvconnect.bench.report import Figure, binary_size
from kvconnect.bench.store.floor import seconds_of
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.kernels.copy import copy_blocks, gather_blocks, scatter_blocks
from kvconnect.kernels.quantized_payload import LIMITS, quantize_payload, quantized_nbytes
from kvconnect.kernels.update import kv_cache_update, reshape_and_cache
from kvconnect.layout import KvCacheLayout

_KIB = 1024
_RUNS = (512, 4 * _KIB, 16 * _KIB, 64 * _KIB, 256 * _KIB, 2048 * _KIB)
_TOKENS, _HEADS = 16, 2
_DIM = 128
_ROW = _DIM * 2
_CALLS = 2000


def host_figures(*, nbytes: int, repeats: int) -> list[Figure]:
    """Measures copies in host memory; see `kvconnect_bench.kernels.run.kernels`.

    Everything runs in one thread, the memcpy too, because more threads speed up both.
    """
    with _one_thread():
        figures = [_ceiling(nbytes, repeats)]
        for run in _RUNS:
            figures += _block_copies(run, nbytes, repeats)
        for run in _RUNS[2:5]:
            figures.append(_updates(run, nbytes, repeats))
        figures += _quantised(nbytes // 4, repeats)
        return figures + _calls()


def _ceiling(nbytes: int, repeats: int) -> Figure:
    copy = _Memcpy(nbytes)
    seconds = statistics.median(seconds_of(copy) for _ in range(repeats))
    return Figure("memcpy", nbytes / seconds / 1e9, "GB/s", "ceiling")


def _block_copies(run: int, nbytes: int, repeats: int) -> list[Figure]:
    """Measures random blocks of one run each, out of a cache twice as large."""
    count = max(1, nbytes // run)
    kv, other = _cache(2 * count, run), _cache(2 * count, run)
    rows = _random_bytes(count * run).view(count, run)
    random = np.random.default_rng(0)
    ids, targets = (random.permutation(2 * count)[:count] for _ in range(2))
    pairs = np.stack([ids, targets], axis=1)
    target = {64: ">= 80 %", 256: ">= 80 %", 2048: ">= 80 %", 16: ">= 50 %"}.get(run // _KIB, "")
    work: dict[str, Callable[[], object]] = {
        "gather": lambda: gather_blocks(kv, ids, rows),
        "scatter": lambda: scatter_blocks(rows, kv, ids),
        "copy": lambda: copy_blocks(kv, other, pairs),
    }
    return [
        _share(
            f"{name}, runs of {binary_size(run)}",
            job,
            count * run,
            repeats,
            "" if name == "copy" else target,
        )
        for name, job in work.items()
    ]


def _updates(run: int, nbytes: int, repeats: int) -> Figure:
    """Measures `kv_cache_update` of 8 heads, with each head's new rows in one run."""
    new, heads = run // _ROW, 8
    batch = max(1, nbytes // (run * heads))
    cache = torch.zeros(batch, heads, 2 * new, _DIM, dtype=torch.bfloat16)
    update = _random_bytes(batch * heads * run).view(torch.bfloat16)
    update = update.view(batch, heads, new, _DIM)
    starts = torch.from_numpy(np.random.default_rng(0).integers(0, new + 1, batch))
    return _share(
        f"kv_cache_update, runs of {binary_size(run)}",
        lambda: kv_cache_update(cache, update, starts),
        batch * heads * run,
        repeats,
        ">= 50 %" if run >= 64 * _KIB else "",
    )


def _quantised(nbytes: int, repeats: int) -> list[Figure]:
    """Measures quantisation block by block, as the codecs of stores do it."""
    layout = KvCacheLayout(1, _HEADS, _DIM, _DIM, 4 * _TOKENS, torch.bfloat16)
    count = max(1, nbytes // layout.block_nbytes)
    blocks = torch.randn(count, layout.block_nbytes // 2).bfloat16().view(torch.uint8)
    encoded = torch.empty(quantized_nbytes(layout), dtype=torch.uint8)

    def quantise(code: str) -> None:
        for block in blocks:
            quantize_payload(block, layout, encoded, dtype=code)

    return [
        _share(f"quantise blocks to {code}", partial(quantise, code), blocks.numel(), repeats)
        for code in LIMITS
    ]


def _calls() -> list[Figure]:
    """Measures calls with one tiny block or token: the cost of a call beside the copying."""
    kv, other = _cache(8, 8 * _KIB), _cache(8, 8 * _KIB)
    rows, pairs = torch.zeros(1, 8 * _KIB, dtype=torch.uint8), np.array([[1, 2]])
    ids = np.array([3])
    token = torch.zeros(1, _HEADS, _DIM, dtype=torch.bfloat16)
    cache, update = torch.zeros(1, 1, 8, _DIM), torch.zeros(1, 1, 1, _DIM)
    slot = torch.tensor([5])
    work: dict[str, Callable[[], object]] = {
        "gather_blocks": lambda: gather_blocks(kv, ids, rows),
        "scatter_blocks": lambda: scatter_blocks(rows, kv, ids),
        "copy_blocks": lambda: copy_blocks(kv, other, pairs),
        "kv_cache_update": lambda: kv_cache_update(cache, update, slot),
        "reshape_and_cache": lambda: reshape_and_cache(token, token, kv, slot, layer=0),
    }
    return [
        Figure(f"a call of {name}", _call_seconds(job) * 1e6, "us", "<= 12 us")
        for name, job in work.items()
    ]


def _share(
    name: str, job: Callable[[], object], nbytes: int, repeats: int, target: str = ""
) -> Figure:
    """Measures the time of a memcpy of as many bytes as a share of the job's own, in turns."""
    copy = _Memcpy(nbytes)
    shares = []
    for _ in range(repeats):
        ceiling = seconds_of(copy)
        shares.append(ceiling / seconds_of(job))
    return Figure(name, 100 * statistics.median(shares), "%", target)


class _Memcpy:
    """A memcpy between two pieces of memory of its own, which are warm."""

    def __init__(self, nbytes: int) -> None:
        self._source, self._target = _random_bytes(nbytes), _random_bytes(nbytes)

    def __call__(self) -> None:
        nbytes = self._source.numel()
        ctypes.memmove(self._target.data_ptr(), self._source.data_ptr(), nbytes)


def _call_seconds(job: Callable[[], object]) -> float:
    """Returns the least mean of several rounds, as other load only adds to it."""

    def calls() -> None:
        for _ in range(_CALLS):
            job()

    return min(seconds_of(calls) for _ in range(5)) / _CALLS


def _cache(num_blocks: int, block_nbytes: int) -> PagedKv:
    """Makes a pool of one layer whose blocks are one run each."""
    tokens = max(1, block_nbytes // (2 * _HEADS * _ROW))
    heads = _HEADS if block_nbytes >= 2 * _HEADS * _ROW else 1
    dim = block_nbytes // (2 * 2 * tokens * heads)
    pool = _random_bytes(num_blocks * block_nbytes).view(torch.bfloat16)
    return PagedKv.from_pool(pool.view(num_blocks, 1, 2, tokens, heads, dim))


def _random_bytes(nbytes: int) -> Tensor:
    # Half-precision numbers of any bits; every page is mapped when the clock starts.
    return torch.from_numpy(np.random.default_rng(1).integers(0, 256, nbytes, np.uint8))


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
