"""Computes over many bytes on several threads, and logs the progress."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

logger = logging.getLogger("kvconnect.digest")

_SECONDS_BETWEEN_LINES = 5.0
_MAX_THREADS = 16

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_threads(
    compute: Callable[[_Item], _Result],
    items: Sequence[_Item],
    nbytes: Callable[[_Item], int],
    what: str = "weights",
) -> Generator[_Result]:
    """Yields the result of `compute` for each of `items`, in order; blocks for each.

    The thread that iterates logs the progress every 5 seconds. If the iterator is closed early,
    items that are not begun are not computed. Errors of `compute` are raised.

    Args:
        compute: called on up to 16 threads.
        items: the arguments of `compute`, one for each call.
        nbytes: returns the bytes of an item, to measure progress.
        what: the noun for all items in the log.
    """
    done, total = 0, sum(map(nbytes, items))
    logged_at = time.monotonic()
    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    pool = ThreadPoolExecutor(threads, "kvconnect-digest")
    try:
        pending = [pool.submit(compute, item) for item in items]
        for item, future in zip(items, pending, strict=True):
            result = future.result()
            done += nbytes(item)
            now = time.monotonic()
            if now - logged_at >= _SECONDS_BETWEEN_LINES:
                logged_at = now
                gib = done / 2**30, total / 2**30
                logger.info("digest of the %s: %.1f of %.1f GiB read", what, *gib)
            yield result
    finally:
        pool.shutdown(cancel_futures=True)
