"""The result of a coroutine on the store's loop, for the thread that started it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any, Generic, TypeVar

T = TypeVar("T")


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
