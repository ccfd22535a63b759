"""One asyncio loop in a thread of its own, where a process does its store's I/O; its threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from kvconnect.errors import UsageError

__all__ = ["DaemonThreads", "IoLoop"]

P = ParamSpec("P")
T = TypeVar("T")
# A thread that has not ended by then waits for something that may never come.
_STUCK_S = 0.2


class IoLoop:
    """Runs coroutines for other threads. `submit` and `call_soon` are thread-safe and do not block.

    All threads are daemons: a store that hangs cannot keep the process from ending.
    """

    def __init__(self, name: str = "kvconnect-io") -> None:
        self.loop = asyncio.new_event_loop()
        # `asyncio.to_thread` of every backend runs here; disks want several reads in flight.
        self._executor = DaemonThreads(16, f"{name}-thread")
        self.loop.set_default_executor(self._executor)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._closed = False
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `coroutine` on the loop.

        Raises:
            UsageError: the loop is closed.
        """
        if self._closed:
            coroutine.close()
            raise UsageError("the I/O loop is closed")
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call `function` on the loop; does nothing once the loop is closed."""
        if not self._closed:
            self.loop.call_soon_threadsafe(function)

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel what still runs, end the thread; blocks up to `timeout_s`; idempotent.

        Work that a cancelled coroutine handed to a thread goes on there until it ends by itself.
        """
        if self._closed:
            return
        self._closed = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout_s)
        self._executor.end(min(timeout_s, _STUCK_S))

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            self._cancel_all()
        finally:
            asyncio.set_event_loop(None)
            self.loop.close()

    def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        # A coroutine may refuse to be cancelled: it is given a moment and then left alone.
        self.loop.run_until_complete(asyncio.wait(tasks, timeout=0.5))


class DaemonThreads(ThreadPoolExecutor):
    """`submit` as `ThreadPoolExecutor` has it, on daemon threads.

    Python waits at exit for every thread of the pools it knows: a read from a dead network mount
    would hold the process for ever. asyncio takes only a subclass as its default executor; nothing
    of the base class but its type is used.
    """

    def __init__(self, max_workers: int, name: str) -> None:
        super().__init__(max_workers)
        self._max = max_workers
        self._name = name
        self._work: dict[Future[Any], Callable[[], None]] = {}  # in order of arrival
        self._daemons: list[threading.Thread] = []
        self._idle = 0
        self._changed = threading.Condition()
        self._ended = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run ``fn(*args, **kwargs)`` on a thread; does not block.

        What is cancelled before its turn is forgotten at once: while all threads are stuck, work
        that is of no use must not pile up.

        Raises:
            RuntimeError: the pool has ended, or there is not even one thread to be had; `fn` is not
                run.
        """
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 (raised where the future is waited for)
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._changed:
            if self._ended:
                raise RuntimeError(f"{self._name}: the pool has ended")
            if len(self._work) >= self._idle and len(self._daemons) < self._max:
                self._start_thread()
            self._work[future] = work
            self._changed.notify()
        future.add_done_callback(self._forget)
        return future

    def end(self, timeout_s: float) -> None:
        """Take no more work, and wait up to `timeout_s` for the threads to end; idempotent."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._daemons:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start_thread(self) -> None:
        name = f"{self._name}-{len(self._daemons)}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more to be had: those there are do the work
            if not self._daemons:
                raise
        else:
            self._daemons.append(thread)

    def _forget(self, future: Future[Any]) -> None:
        with self._changed:
            self._work.pop(future, None)

    def _run(self) -> None:
        while (work := self._next()) is not None:
            work()
            del work  # or an idle thread keeps the arguments of its last work alive

    def _next(self) -> Callable[[], None] | None:
        """Wait for work; ``None``: there is none and the pool has ended."""
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._work or self._ended)
            self._idle -= 1
            return self._work.pop(next(iter(self._work))) if self._work else None
