"""What requests leave behind, measured in a process of its own."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import numpy as np
import psutil
from harness import disk_url, open_llm

from kvconnect import SamplingParams


def grow(model: Path, tmp_path: Path, requests: int, warm_up: int) -> None:
    """Serves so many requests, and fails if they leave anything."""
    process = psutil.Process()
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=2, ignore_eos=True)

    def serve(llm: object, count: int) -> None:
        for _ in range(count // 50):
            prompts = [[int(t) for t in rng.integers(1, 250, 40)] for _ in range(50)]
            llm.generate(prompts, params)  # type: ignore[attr-defined]

    def state() -> tuple[int, int, int, int]:
        gc.collect()
        objects = len(gc.get_objects())
        return objects, process.num_fds(), threading.active_count(), process.memory_info().rss

    before_open = set(threading.enumerate())
    files = process.num_fds()
    with open_llm(model, disk_url(tmp_path / "store", "4MiB")) as llm:
        serve(llm, warm_up)
        before = state()
        serve(llm, requests)
        after = state()
        # Blocks on their way to the disk are no growth: they are gone in a moment.
        deadline = time.monotonic() + 60
        while after[0] - before[0] >= 0.2 * requests and time.monotonic() < deadline:
            after = state()
    objects, fds, threads, rss = (b - a for a, b in zip(before, after, strict=True))
    assert objects < 0.2 * requests, "objects per request"
    assert fds <= 2
    assert threads <= 2
    assert rss < 48 << 20
    used = sum(path.stat().st_size for path in (tmp_path / "store").rglob("*"))
    assert used < (4 << 20) + (2 << 20)  # the limit, and the index beside it
    gc.collect()
    deadline = time.monotonic() + 60
    while len(left := set(threading.enumerate()) - before_open) > 1:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
    assert process.num_fds() <= files + 2
