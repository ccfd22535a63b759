"""Blocking requests on threads, a bounded number at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from kvconnect.errors import BackendUnavailable

__all__ = ["Jobs", "settled"]

T = TypeVar("T")


class Jobs:
    """Runs functions on `threads` threads. All methods belong to one event loop.

    Whoever waits for a job goes on only once it has ended, or was never begun: also if the waiter
    is cancelled. So nothing uses a buffer behind its owner's back.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._running: set[asyncio.Future[Any]] = set()
        self._closed = False

    @property
    def running(self) -> int:
        """Jobs that have not ended."""
        return len(self._running)

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns, on a thread.

        Raises:
            BackendUnavailable: the jobs were closed.
        """
        (result,) = await self.run_all([work])
        if isinstance(result, BaseException):
            raise result
        return result

    async def run_all(self, works: Sequence[Callable[[], T]]) -> list[T | BaseException]:
        """What each of `works` returns or raises, once all have ended.

        Raises:
            BackendUnavailable: the jobs were closed; nothing was begun.
        """
        if self._closed:
            raise BackendUnavailable("s3 store: is closed")
        jobs = [self._pool.submit(work) for work in works]
        futures = [asyncio.wrap_future(job) for job in jobs]
        for future in futures:
            self._running.add(future)
            future.add_done_callback(self._running.discard)
        return await settled(futures, jobs)

    async def close(self) -> None:
        """Wait for jobs that run, forget those that wait for their turn; take no more."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._running:
            await asyncio.wait(self._running)


async def settled(
    futures: Sequence[asyncio.Future[T]], jobs: Sequence[Future[T]] = ()
) -> list[T | BaseException]:
    """Results or errors of all `futures`, once all have ended, also if this is cancelled.

    Then, `jobs` that have not begun are cancelled.
    """
    cancelled: asyncio.CancelledError | None = None
    while pending := [future for future in futures if not future.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
            for job in jobs:
                job.cancel()
    results: list[T | BaseException] = []
    for future in futures:
        if future.cancelled():
            results.append(BackendUnavailable("s3 store: closed before its turn came"))
        else:
            results.append(future.exception() or future.result())
    if cancelled is not None:
        raise cancelled
    return results
