"""Blocking requests on threads, a bounded number at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

from kvconnect.backends.lanes import running_threads
from kvconnect.errors import BackendUnavailable

__all__ = ["Jobs", "settled"]

T = TypeVar("T")


class Jobs:
    """Runs functions on `threads` threads. All methods belong to one event loop.

    Whoever waits for a job goes on only once it has ended, or was never begun: also if the waiter
    is cancelled. So nothing uses a buffer behind its owner's back.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._pool = running_threads(threads, name)
        self._running: set[_Ended[Any]] = set()
        self._closed = False

    @property
    def running(self) -> int:
        """Jobs that have not ended."""
        return sum(one.left for one in self._running)

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
        if not works:
            return []
        jobs = [self._pool.submit(work) for work in works]
        ended = _Ended(jobs, asyncio.get_running_loop())
        self._running.add(ended)
        try:
            await ended
        finally:
            self._running.discard(ended)
        return [
            BackendUnavailable("s3 store: closed before its turn came")
            if job.cancelled()
            else job.exception() or job.result()
            for job in jobs
        ]

    async def close(self) -> None:
        """Wait for jobs that run, forget those that wait for their turn; take no more."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._running:
            await asyncio.wait(self._running)


class _Ended(asyncio.Future[None], Generic[T]):
    """Done once all `jobs` have ended; who waits for it is cancelled only then.

    One future, and one message from the threads to the loop, however many jobs there are.
    """

    def __init__(self, jobs: Sequence[Future[T]], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.left = len(jobs)
        self._jobs = jobs
        self._lock = threading.Lock()
        for job in jobs:
            job.add_done_callback(self._one_ended)

    def cancel(self, msg: object = None) -> bool:
        """Cancel the jobs that have not begun; the others run to their end."""
        for job in self._jobs:
            job.cancel()
        return False

    def _one_ended(self, _: Future[T]) -> None:
        with self._lock:
            self.left -= 1
            last = not self.left
        if last:
            with suppress(RuntimeError):  # the loop was closed: nobody waits any more
                self.get_loop().call_soon_threadsafe(self.set_result, None)


async def settled(futures: Sequence[asyncio.Future[T]]) -> list[T | BaseException]:
    """Results or errors of all `futures`, once all have ended, also if this is cancelled."""
    cancelled: asyncio.CancelledError | None = None
    while pending := [future for future in futures if not future.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    results: list[T | BaseException] = []
    for future in futures:
        if future.cancelled():
            results.append(BackendUnavailable("s3 store: closed before its turn came"))
        else:
            results.append(future.exception() or future.result())
    if cancelled is not None:
        raise cancelled
    return results
