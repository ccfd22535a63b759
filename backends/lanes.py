"""Pools of threads that are there before there is work for them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from kvconnect.errors import BackendUnavailable

__all__ = ["running_pools", "running_threads"]


def running_threads(count: int, name: str) -> ThreadPoolExecutor:
    """A pool whose `count` threads run already, so that `submit` fails only after `shutdown`.

    A pool that starts them as they are needed may find that there are no more to be had. Its
    `submit` raises then, and yet the work is done some time: on buffers that were handed on.

    Raises:
        BackendUnavailable: there are not so many threads to be had; none is left.
    """
    pool = ThreadPoolExecutor(count, thread_name_prefix=name)
    all_there = threading.Barrier(count)  # or the first would do what the others are started with
    try:
        for _ in range(count):
            pool.submit(all_there.wait)
    except RuntimeError as error:
        all_there.abort()
        pool.shutdown()
        raise BackendUnavailable(f"{name}: {error}; allow this process more threads") from error
    return pool


def running_pools(counts: Mapping[str, int]) -> list[ThreadPoolExecutor]:
    """A pool of `running_threads` for each name, with so many.

    Raises:
        BackendUnavailable: there are not so many threads to be had; none is left of any pool.
    """
    with ExitStack() as started:
        pools = []
        for name, count in counts.items():
            pools.append(running_threads(count, name))
            started.callback(pools[-1].shutdown)
        started.pop_all()
    return pools
