"""One asyncio loop in a thread of its own, where a process does its store's I/O."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from kvconnect.backends.daemon_threads import DaemonThreads
from kvconnect.errors import UsageError

__all__ = ["IoLoop"]

logger = logging.getLogger("kvconnect")

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
            while not self._ran_to_its_end():
                pass
            self._cancel_all()
        finally:
            asyncio.set_event_loop(None)
            self.loop.close()

    def _ran_to_its_end(self) -> bool:
        """Whether the loop was stopped, and not by a store whose task wants to end the process."""
        try:
            self.loop.run_forever()
        except (KeyboardInterrupt, SystemExit) as error:
            logger.warning("a task of the store raised %r; nothing else ends by that", error)
            if self._closed:  # which may have been heard just before
                self.loop.call_soon(self.loop.stop)
            return False
        return True

    def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        # A coroutine may refuse to be cancelled: it is given a moment and then left alone.
        self.loop.run_until_complete(asyncio.wait(tasks, timeout=0.5))
