"""The daemon threads of asyncio's default executor, which cannot keep the process from ending."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from kvconnect.backends.lanes import fulfil

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreads(ThreadPoolExecutor):
    """A pool whose `submit` is that of `ThreadPoolExecutor`, but on daemon threads.

    Python waits at exit for every thread of its own pools, so a read from a stuck network mount
    would hold the process for ever. asyncio accepts only a subclass of `ThreadPoolExecutor` as
    default executor; of the base class only the type is used.
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
        """Runs ``fn(*args, **kwargs)`` on a thread; does not block.

        Work that is cancelled before its turn is removed at once: while all threads are stuck,
        cancelled work must not pile up.

        Raises:
            RuntimeError: the pool has ended, or no thread can be started; `fn` is not run.
        """
        future: Future[T] = Future()
        work = partial(fulfil, future, partial(fn, *args, **kwargs))
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
        """Refuses further work and waits up to `timeout_s` for the threads to end; idempotent."""
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
        except RuntimeError:  # no more threads can be started: the present ones do the work
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
            del work  # otherwise an idle thread keeps the arguments of its last work alive

    def _next(self) -> Callable[[], None] | None:
        """Waits for work and returns it; ``None`` if there is none and the pool has ended."""
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._work or self._ended)
            self._idle -= 1
            return self._work.pop(next(iter(self._work))) if self._work else None
