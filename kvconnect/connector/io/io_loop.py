"""An asyncio loop in a thread of its own, on which a process does its store's I/O."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from kvconnect.backends.daemon_threads import DaemonThreads
from kvconnect.errors import UsageError

logger = logging.getLogger("kvconnect")

T = TypeVar("T")
_HAS_EVENTFD = hasattr(os, "eventfd")  # on Linux
# A thread that still runs after this time may never end.
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
        self._tasks: set[asyncio.Task[Any]] = set()  # asyncio does not keep them
        self._submitted: deque[tuple[Coroutine[Any, Any, Any], Future[Any]]] = deque()
        # Waking the loop by its own means, a socket, costs a submitting thread twice as much.
        self._wake: int | None = None
        if _HAS_EVENTFD:
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            # Not when the loop is closed: a thread that is submitting would write to another file.
            weakref.finalize(self, os.close, self._wake).atexit = False
            self.loop.add_reader(self._wake, self._woken)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts `coroutine` on the loop; cancelling the result cancels it.

        Raises:
            UsageError: the loop is closed.
        """
        if self.is_closed():
            coroutine.close()
            raise UsageError("the I/O loop is closed")
        future: Future[T] = Future()
        self._submitted.append((coroutine, future))
        if self._wake is None:
            self.call_soon(self._begin_all)
        else:
            os.eventfd_write(self._wake, 1)
        if self.is_closed():  # just now: it may have ended before it saw this
            future.cancel()
        return future

    def is_closed(self) -> bool:
        """Returns whether `close` was called."""
        return self._closed

    def call_soon(self, function: Callable[[], object]) -> None:
        """Calls `function` on the loop; does nothing once the loop is closed."""
        if not self._closed:
            self.loop.call_soon_threadsafe(function)

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancels what still runs and ends the thread; blocks up to `timeout_s`; idempotent.

        Work that a cancelled coroutine started on another thread continues until it ends.
        """
        if self._closed:
            return
        self._closed = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout_s)
        self._executor.end(min(timeout_s, _STUCK_S))

    def _woken(self) -> None:
        if self._wake is not None:
            os.eventfd_read(self._wake)
        self._begin_all()

    def _begin_all(self) -> None:
        while self._submitted:
            coroutine, future = self._submitted.popleft()
            if future.cancelled():
                coroutine.close()
                continue
            task = self.loop.create_task(coroutine)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(partial(_settle, future))
            future.add_done_callback(partial(self._cancel_with, task))

    def _cancel_with(self, task: asyncio.Task[Any], future: Future[Any]) -> None:
        """Cancels `task` if `future` was cancelled; on any thread."""
        if future.cancelled():
            self.call_soon(task.cancel)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            while not self._ran_to_its_end():
                pass
            self._cancel_all()
        finally:
            self._closed = True
            asyncio.set_event_loop(None)
            if self._wake is not None:
                self.loop.remove_reader(self._wake)
            self.loop.close()

    def _ran_to_its_end(self) -> bool:
        """Returns whether `close` stopped the loop, rather than an exit raised in a task."""
        try:
            self.loop.run_forever()
        except (KeyboardInterrupt, SystemExit) as error:
            logger.warning("a task of the store raised %r; nothing else ends by that", error)
            if self._closed:  # an exit may have been raised just before
                self.loop.call_soon(self.loop.stop)
            return False
        return True

    def _cancel_all(self) -> None:
        self._begin_all()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        # A coroutine may refuse to be cancelled: wait 0.5 s for it, then abandon it.
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=0.5))
        # A task that ended in the loop's last turn has not settled its future yet.
        self.loop.run_until_complete(asyncio.sleep(0))


def _settle(future: Future[T], task: asyncio.Task[T]) -> None:
    """Gives `future` the outcome of `task`, which has ended, unless `future` was cancelled."""
    if task.cancelled():
        future.cancel()
        return
    error = task.exception()  # retrieved in any case, or asyncio would log it
    if future.set_running_or_notify_cancel():
        if error is None:
            future.set_result(task.result())
        else:
            future.set_exception(error)
