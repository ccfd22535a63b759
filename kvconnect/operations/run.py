"""Runs a verb's coroutine to its end, with or without a running event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kvconnect.backends.main_loop import main_loop, run_to_end

T = TypeVar("T")

_END_S = 5.0


def run_anywhere(work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` on an event loop of its own and returns its result; blocks the caller.

    On the main thread Ctrl-C cancels `work`. Where an event loop runs already, as in a notebook,
    `work` runs on another thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        if threading.current_thread() is threading.main_thread():
            return run_to_end(work)
        return _run(work)
    with ThreadPoolExecutor(1, "kvconnect-verb") as thread:
        return thread.submit(_run, work).result()


def _run(work: Coroutine[Any, Any, T]) -> T:
    with main_loop(_END_S) as loop:
        return loop.run_until_complete(work)


class AbortableRun:
    """Runs one coroutine on the calling thread until another thread aborts it.

    Called with a coroutine, it blocks until that has ended, and raises ``CancelledError`` if it was
    aborted. `done` and `abort` may be used from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancel: Callable[[], object] | None = None
        self._aborted = False
        self.done = False

    def __call__(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work`, and returns its result."""
        with main_loop(_END_S) as loop:
            task = loop.create_task(work)
            with self._lock:
                self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
                if self._aborted:
                    task.cancel()
            try:
                return loop.run_until_complete(task)
            finally:
                with self._lock:
                    self._cancel = None
                    self.done = True

    def abort(self) -> None:
        """Cancels the coroutine, now or once it is started; returns at once."""
        with self._lock:
            self._aborted = True
            if self._cancel is not None:
                self._cancel()
