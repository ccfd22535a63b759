"""Caches whose last reference went: saved on a thread of their own, not where that happened."""

from __future__ import annotations

import logging
import os
import threading
from queue import SimpleQueue
from typing import Protocol

from kvconnect.errors import KvConnectError

__all__ = ["EndedCaches"]

_log = logging.getLogger("kvconnect")


class _Savable(Protocol):
    def save(self) -> None: ...


class EndedCaches:
    """Takes caches in from their destructors, which may run anywhere, also inside of a lock.

    `put` takes no lock and does no work. The thread is a daemon; in a forked process there is none,
    and nothing is taken in.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._open = True
        self._queue: SimpleQueue[_Savable | threading.Event | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name="kvconnect-prompt-cache", daemon=True
        )
        self._thread.start()

    def put(self, cache: _Savable) -> None:
        """Have `cache` saved soon; nothing after `close`."""
        if self._open and os.getpid() == self._process:
            self._queue.put(cache)

    def wait(self, timeout_s: float) -> bool:
        """Block until all that was put before is saved, at most `timeout_s`; whether it is."""
        if not self._open or os.getpid() != self._process:
            return True
        reached = threading.Event()
        self._queue.put(reached)
        return reached.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Save what was put before, and end the thread; blocks at most `timeout_s`. Idempotent."""
        if os.getpid() != self._process:
            return
        was_open, self._open = self._open, False
        if was_open:
            self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                item.save()
            except (KvConnectError, RuntimeError) as error:
                _log.warning("a prompt cache was not saved at its end: %s", error)
            del item
