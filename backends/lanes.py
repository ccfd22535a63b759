"""The named threads for blocking work: a waiter returns only when its work has ended."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from kvconnect.errors import BackendUnavailable

T = TypeVar("T")

# The number of cancelled works that may stay in a queue, unless half of the queue is more.
_FEW = 64


class Lane:
    """A set of `threads` threads that run blocking work of one kind in the order it comes.

    A lookup does not wait behind megabytes if it has a lane of its own. A waiter returns only once
    its work has ended, or was never begun, even if the waiter is cancelled: so no thread uses a
    buffer that its owner uses again.

    All threads start at once, so that no work is accepted that no thread will run. They are
    daemons, so a read from a stuck network mount does not keep the process from ending.

    Args:
        name: the name of the threads.
        threads: the number of threads.
        owner: the name of their owner, for errors; ``None``: `name`.

    Raises:
        BackendUnavailable: the threads cannot be started; none is left running.
    """

    def __init__(self, name: str, threads: int, owner: str | None = None) -> None:
        self._owner = owner or name
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._waiting: set[_Ended] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._cancelled = 0
        self._process = os.getpid()
        self._threads: list[threading.Thread] = []
        try:
            for number in range(threads):
                thread = threading.Thread(
                    target=_serve, args=(self._queue,), name=f"{name}-{number}", daemon=True
                )
                thread.start()
                self._threads.append(thread)
                # A garbage-collected lane leaves no thread behind, as one that is ended.
                weakref.finalize(self, self._queue.put, None).atexit = False
        except RuntimeError as error:
            self.end()
            raise BackendUnavailable(f"{name}: {error}; allow this process more threads") from error

    @property
    def running(self) -> int:
        """The works of `run` and `run_all` that have not ended; for the event loop only."""
        return sum(one.left for one in self._waiting)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queues `work` for a thread; does not block. Callable from any thread.

        Raises:
            BackendUnavailable: the lane was closed, or is another process's; `work` is not run.
        """
        future: Future[T] = Future()
        self._put([(future, work)])
        return future

    async def run(self, work: Callable[[], T], abort: Callable[[], object] | None = None) -> T:
        """Runs `work` on a thread and returns its result; on an event loop.

        Args:
            work: runs on a thread.
            abort: called once if the waiter is cancelled while `work` runs, to end it soon; must
                not block.

        Raises:
            BackendUnavailable: the lane was closed before its turn came.
        """
        (result,) = await self.run_all([work], abort)
        if isinstance(result, BaseException):
            raise result
        return result

    async def run_all(
        self, works: Sequence[Callable[[], T]], abort: Callable[[], object] | None = None
    ) -> list[T | BaseException]:
        """Runs `works`; returns the result or error of each, once all have ended; see `run`.

        Raises:
            BackendUnavailable: the lane was closed, or is another process's; nothing was begun.
        """
        if not works:
            return []
        futures: list[Future[T]] = [Future() for _ in works]
        ended = _Ended(futures, abort)
        self._put(list(zip(futures, works, strict=True)))
        self._waiting.add(ended)
        try:
            await ended
        except asyncio.CancelledError:
            self._forget(sum(future.cancelled() for future in futures))
            raise
        finally:
            self._waiting.discard(ended)
        return [
            BackendUnavailable(f"{self._owner}: closed before its turn came")
            if future.cancelled()
            else future.exception() or future.result()
            for future in futures
        ]

    def _put(self, items: Sequence[_Work]) -> None:
        # Before the lock, which no thread may ever release in a forked process.
        if os.getpid() != self._process:
            raise BackendUnavailable(
                f"{self._owner}: was opened by process {self._process}, of which this one was "
                "forked; open it in this one"
            )
        with self._lock:
            if self._closed:
                raise BackendUnavailable(f"{self._owner}: is closed")
            for item in items:
                self._queue.put(item)

    def _forget(self, cancelled: int) -> None:
        """Removes cancelled works from the queue if they are many.

        While all threads are stuck, cancelled work would pile up.
        """
        with self._lock:
            self._cancelled += cancelled
            if self._closed or self._cancelled <= max(_FEW, self._queue.qsize() // 2):
                return
            self._cancelled = 0
            items: list[_Work | None] = []
            with suppress(Empty):
                while True:
                    items.append(self._queue.get_nowait())
            for item in items:
                if item is None or not item[0].cancelled():
                    self._queue.put(item)

    async def close(self) -> None:
        """Refuses further work, cancels queued work, waits for running work; idempotent."""
        self.end()
        if self._waiting:
            await asyncio.wait(self._waiting)

    async def idle(self) -> None:
        """Waits until no work of `run` and `run_all` is left."""
        while self._waiting:
            await asyncio.wait(self._waiting)

    def end(self) -> None:
        """Refuses further work and cancels queued work; the threads end afterwards.

        Does not block. Callable from any thread.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            forgotten: list[Future[Any]] = []
            with suppress(Empty):
                while (item := self._queue.get_nowait()) is not None:
                    forgotten.append(item[0])
            for _ in self._threads:
                self._queue.put(None)
        for future in forgotten:
            future.cancel()

    def abort(self) -> None:
        """Calls `end`, and `abort` of the running works that have one; on the event loop.

        Does not block. A waiter returns once its work has ended, with its result.
        """
        self.end()
        for one in tuple(self._waiting):
            one.cancel()

    def join(self, timeout_s: float | None = None) -> None:
        """Blocks until the threads have ended, after `end`; at most `timeout_s` for each."""
        for thread in self._threads:
            thread.join(timeout_s)


class Lanes:
    """A set of lanes that start together: ``Lanes("kvconnect-s3", "s3 store", requests=8)``.

    ``lanes["requests"]`` is one of them.

    Raises:
        BackendUnavailable: the threads cannot be started; none is left running in any lane.
    """

    def __init__(self, name: str, owner: str | None = None, /, **threads: int) -> None:
        self._lanes: dict[str, Lane] = {}
        try:
            for kind, count in threads.items():
                self._lanes[kind] = Lane(f"{name}-{kind}", count, owner)
        except BackendUnavailable:
            self.end()
            raise

    def __getitem__(self, kind: str) -> Lane:
        return self._lanes[kind]

    @property
    def running(self) -> int:
        """The sum of `Lane.running` of all lanes."""
        return sum(lane.running for lane in self._lanes.values())

    async def close(self) -> None:
        """Calls `end` of all lanes before it waits for the first one; see `Lane.close`."""
        self.end()
        for lane in self._lanes.values():
            await lane.close()

    async def idle(self) -> None:
        """Waits until no work is left in any lane; see `Lane.idle`."""
        for lane in self._lanes.values():
            await lane.idle()

    def end(self) -> None:
        """Calls `Lane.end` of all lanes."""
        for lane in self._lanes.values():
            lane.end()

    def abort(self) -> None:
        """Calls `Lane.abort` of all lanes, after `end` of all."""
        self.end()
        for lane in self._lanes.values():
            lane.abort()

    def join(self) -> None:
        """Calls `Lane.join` of all lanes."""
        for lane in self._lanes.values():
            lane.join()


async def settled(futures: Sequence[asyncio.Future[T]]) -> list[T | BaseException]:
    """Returns results or errors of all `futures`, once all have ended, even if it is cancelled."""
    ended = asyncio.gather(*futures, return_exceptions=True)
    cancelled: asyncio.CancelledError | None = None
    while not ended.done():
        try:
            await asyncio.wait([ended])  # which cancels none of them
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return ended.result()


def results_of(outcomes: Sequence[T | BaseException]) -> list[T]:
    """Returns `outcomes` if none of them is an error; raises the first error otherwise."""
    results = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        results.append(outcome)
    return results


_Work = tuple[Future[Any], Callable[[], Any]]


def fulfil(future: Future[T], work: Callable[[], T]) -> None:
    """Runs `work` and sets its result or error on `future`, unless `future` was cancelled."""
    if future.set_running_or_notify_cancel():
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            future.set_exception(error)
        else:
            future.set_result(result)


def _serve(queue: SimpleQueue[_Work | None]) -> None:
    while (item := queue.get()) is not None:
        fulfil(*item)
        del item  # otherwise an idle thread keeps its last work alive


class _Ended(asyncio.Future[None]):
    """A future that is done once all `futures` have ended, even if its waiter is cancelled.

    The threads send one message to the event loop, however many works there are: each message
    costs time.
    """

    def __init__(
        self, futures: Sequence[Future[Any]], abort: Callable[[], object] | None = None
    ) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self.left = len(futures)
        self._futures = futures
        self._abort = abort
        self._lock = threading.Lock()
        for future in futures:
            future.add_done_callback(self._one_ended)

    def cancel(self, msg: object = None) -> bool:
        """Cancels works that have not begun and aborts the rest, which still have to end."""
        begun = [future for future in self._futures if not future.cancel()]
        abort, self._abort = self._abort, None
        if abort is not None and not all(future.done() for future in begun):
            abort()
        return False

    def _one_ended(self, _: Future[Any]) -> None:
        with self._lock:
            self.left -= 1
            last = not self.left
        if last:
            with suppress(RuntimeError):  # the loop was closed: no caller waits any more
                self.get_loop().call_soon_threadsafe(self.set_result, None)
