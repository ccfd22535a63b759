"""An asyncio loop in a thread of its own, on which a process does its store's I/O; its replies."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, Generic, TypeVar

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
        self._submitted: deque[tuple[Coroutine[Any, Any, Any], Reply[Any]]] = deque()
        # Waking the loop by its own means, a socket, costs a submitting thread twice as much.
        self._wake: int | None = None
        if _HAS_EVENTFD:
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            # Not when the loop is closed: a thread that is submitting would write to another file.
            weakref.finalize(self, os.close, self._wake).atexit = False
            self.loop.add_reader(self._wake, self._woken)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Reply[T]:
        """Starts `coroutine` on the loop.

        Raises:
            UsageError: the loop is closed.
        """
        if self.is_closed():
            coroutine.close()
            raise UsageError("the I/O loop is closed")
        reply: Reply[T] = Reply(self.call_soon)
        self._submitted.append((coroutine, reply))
        if self._wake is None:
            self.call_soon(self._begin_all)
        else:
            os.eventfd_write(self._wake, 1)
        if self.is_closed():  # just now: it may have ended before it saw this
            reply.cancel()
        return reply

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
            coroutine, reply = self._submitted.popleft()
            if reply.done():
                coroutine.close()
                continue
            task = self.loop.create_task(coroutine)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            reply.follow(task)

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
        # A task that ended in the loop's last turn has not settled its reply yet.
        self.loop.run_until_complete(asyncio.sleep(0))


class Reply(Generic[T]):
    """A future for one thread: without a lock, and without an event until that thread waits.

    The scheduler's thread makes one at every prompt's admission, so its cost counts.

    Args:
        call_soon: calls a function on the loop.
    """

    __slots__ = ("_call_soon", "_done", "_error", "_result", "_task", "_waiting")

    def __init__(self, call_soon: Callable[[Callable[[], object]], object]) -> None:
        self._call_soon = call_soon
        self._task: asyncio.Task[T] | None = None
        self._done = False
        self._error: BaseException | None = None
        self._result: Any = None
        self._waiting: threading.Event | None = None

    @classmethod
    def settled(cls, result: T) -> Reply[T]:
        """Returns a reply whose result is `result`."""
        reply = cls(lambda _: None)
        reply._end(result)
        return reply

    # ------------------------------------------------------------------ on the caller's thread

    def done(self) -> bool:
        """Returns whether the coroutine ended, or `cancel` was called."""
        return self._done

    def result(self, timeout: float | None = None) -> T:
        """Returns the coroutine's result; blocks up to `timeout` seconds for it.

        Raises:
            TimeoutError: the coroutine has not ended.
            CancelledError: the coroutine was cancelled.
            BaseException: the coroutine's own error.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        found: T = self._result
        return found

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Returns the coroutine's exception, or ``None`` if it returned; blocks as `result` does.

        Raises:
            TimeoutError, CancelledError: as `result`.
        """
        if not self.done():
            # The loop reads `_waiting` after it has set `_done`. This thread reads `_done` after it
            # has set `_waiting`. So this thread sees the answer, or the loop sets the event.
            self._waiting = waiting = threading.Event()
            if not self.done() and not waiting.wait(timeout):
                raise TimeoutError
        if isinstance(self._error, CancelledError):
            raise self._error
        return self._error

    def cancel(self) -> None:
        """Cancels the coroutine, unless it has ended; `result` raises `CancelledError` then."""
        if not self._done:
            self._end(error=CancelledError())
            self._call_soon(self._cancel_task)

    # ------------------------------------------------------------------ on the loop

    def follow(self, task: asyncio.Task[T]) -> None:
        """Makes the result of `task` this reply's, once `task` has ended."""
        self._task = task
        task.add_done_callback(self._ended)

    def _cancel_task(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _ended(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self._end(error=CancelledError())
        elif (error := task.exception()) is not None:
            self._end(error=error)
        else:
            self._end(task.result())

    def _end(self, result: T | None = None, error: BaseException | None = None) -> None:
        if self._done:
            return
        self._result, self._error = result, error
        self._done = True
        if self._waiting is not None:
            self._waiting.set()
