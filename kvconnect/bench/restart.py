"""Measures a restart from the store against its floor: ``kvconnect bench restart``.

The floor has three parts. The prompt's blocks are read from the store's own file, cold and in the
store's own I/O mode. They are copied once into a new process's pool, memory that was never touched.
The one prompt token that is never stored is computed. `idle_overhead` measures what an attached
store costs while nothing is loaded or saved.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from kvconnect import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams
from kvconnect.backends.disk.files.direct_io import open_direct
from kvconnect.bench.report import Figure, median_ratio
from kvconnect.bench.store.floor import seconds_of
from kvconnect.bench.workload import random_prompt
from kvconnect.connector.runtime.manager import KvCacheConnectorManager
from kvconnect.tokens import TokenArray

_READ_NBYTES = 1 << 20
_ONE = SamplingParams(max_tokens=1, ignore_eos=True)
_CONNECTOR_CALLS = (
    "begin_step",
    "wait_for_layer_load",
    "save_kv_layer",
    "end_forward",
    "agree",
    "end_step",
    "wait_seconds",
)


def restart(model: Path, scratch: Path, *, num_tokens: int, repeats: int) -> list[Figure]:
    """Measures the time to first token of a prompt that an earlier engine stored on disk.

    Blocks for minutes.

    Args:
        model: directory of the model.
        scratch: an empty directory for the store, on the disk that is to be measured.
        num_tokens: length of the prompt.
        repeats: number of restarts; the figures are medians.
    """
    prompt = random_prompt(num_tokens, seed=1)
    store = scratch / "store"
    cache = KvCacheConfig(max_tokens=2 * num_tokens)
    config = KvCacheConnectorConfig(url=f"disk://{store}?capacity=16GiB", lookup_timeout_ms=1000)
    with LLM(model, kv_cache=cache, connector=config) as llm:
        cold = _first_token(llm, prompt)
        again = [_first_token(llm, prompt, at_most=1) for _ in range(repeats)]
        block = llm.layout.block_nbytes
    nbytes = -(-num_tokens // cache.tokens_per_block) * block
    data = max(store.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    restored, reads, copies = [], [], []
    for _ in range(repeats):
        reads.append(cold_read_seconds(data, min(nbytes, data.stat().st_size)))
        copies.append(first_pass_seconds(nbytes))
        with LLM(model, kv_cache=cache, connector=config) as llm:
            # The first blocks of a slow disk may be computed beside the load.
            restored.append(_first_token(llm, prompt, at_most=num_tokens // 2))
    read, copy, seconds = map(statistics.median, (reads, copies, restored))
    suffix = statistics.median(again)
    floor = read + copy + suffix
    return [
        Figure("prompt", num_tokens, "tokens"),
        Figure("stored", nbytes / 2**20, "MiB"),
        Figure("first token, computed", cold * 1e3, "ms"),
        Figure("first token, restored", seconds * 1e3, "ms"),
        Figure("speed-up", cold / seconds, "x", ">= 10"),
        Figure("floor: cold read", read * 1e3, "ms"),
        Figure("floor: one pass into a new pool", copy * 1e3, "ms"),
        Figure("floor: last token", suffix * 1e3, "ms"),
        Figure("restored / floor", seconds / floor, "x", "<= 1.25"),
    ]


def idle_overhead(model: Path, *, steps: int) -> list[Figure]:
    """Measures the share of a decode step inside connector calls, with nothing to load or save."""
    config = KvCacheConnectorConfig(url="memory:?capacity=64MiB", min_priority=100)
    params = SamplingParams(max_tokens=steps + 20, ignore_eos=True)
    with _timed_connector() as timings, LLM(model, connector=config) as llm:
        llm.generate([random_prompt(64, seed=2)], params)
    spent, whole = zip(*timings[10 : 10 + steps], strict=True)
    return [
        Figure("decode step", statistics.median(whole) * 1e3, "ms"),
        Figure("inside connector calls", statistics.median(spent) * 1e6, "us"),
        Figure("share of a step, median", median_ratio(spent, whole) * 100, "%", "<= 2"),
    ]


def _first_token(llm: LLM, prompt: TokenArray, *, at_most: int | None = None) -> float:
    """Returns the seconds to the first token.

    Raises:
        RuntimeError: more than `at_most` prompt tokens were computed, or no token was generated.
    """
    output = llm.generate([prompt], _ONE)[0]
    if at_most is not None and output.computed_tokens > at_most:
        raise RuntimeError(f"{output.computed_tokens} prompt tokens were computed, not {at_most}")
    if output.ttft_ms is None:
        raise RuntimeError("no token was generated")
    return output.ttft_ms / 1e3


@contextmanager
def _timed_connector() -> Iterator[list[tuple[float, float]]]:
    """Yields for each step of each engine the seconds inside connector calls, and in all."""
    steps: list[tuple[float, float]] = []
    inside = 0.0
    last_end = time.perf_counter()
    originals = {name: getattr(KvCacheConnectorManager, name) for name in _CONNECTOR_CALLS}

    def timed(name: str, original: Callable[..., object]) -> Callable[..., object]:
        def call(self: KvCacheConnectorManager, *args: object) -> object:
            nonlocal inside, last_end
            start = time.perf_counter()
            result = original(self, *args)
            end = time.perf_counter()
            inside += end - start
            if name == "end_step":
                steps.append((inside, end - last_end))
                inside, last_end = 0.0, end
            return result

        return call

    for name, original in originals.items():
        setattr(KvCacheConnectorManager, name, timed(name, original))
    try:
        yield steps
    finally:
        for name, original in originals.items():
            setattr(KvCacheConnectorManager, name, original)


def cold_read_seconds(path: Path, nbytes: int) -> float:
    """Returns the seconds to read the first `nbytes` of a file, past the page cache.

    Reads with O_DIRECT where the filesystem has it. Elsewhere the file's pages are dropped from the
    page cache first. Blocks.
    """
    descriptor = open_direct(path, os.O_RDONLY)
    # Anonymous maps are page-aligned, as O_DIRECT requires.
    with mmap.mmap(-1, nbytes + _READ_NBYTES) as memory, memoryview(memory) as target:
        target[:] = bytes(len(target))  # the first touch of memory is not the disk's time
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        for offset in range(0, nbytes - nbytes % 4096, _READ_NBYTES):
            os.preadv(descriptor, [target[offset : offset + _READ_NBYTES]], offset)
        seconds = time.perf_counter() - start
    os.close(descriptor)
    return seconds


def forget_files(directory: Path) -> None:
    """Drops all files below `directory` from the page cache. Blocks on the disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)  # else pages that are not on the disk yet would stay
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def first_pass_seconds(nbytes: int) -> float:
    """Returns the seconds to copy `nbytes` into host memory that was never touched before.

    The pool of a new process is such memory: the kernel maps its pages during the copy. The source
    is warm. torch copies with all its threads.
    """
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.from_numpy(np.zeros(nbytes, np.uint8))  # mapped, not yet there
    return seconds_of(lambda: target.copy_(source))
