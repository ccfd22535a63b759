"""The caches without references: held until the model is checked, then saved on a thread."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

_log = logging.getLogger("kvconnect")


class Savable(Protocol):
    """A cache that can be saved."""

    @property
    def nbytes(self) -> int:
        """The memory of keys and values in bytes."""

    def save(self, *, whole: bool) -> None:
        """Saves the checked tokens; `whole` includes the partly filled last block."""


C = TypeVar("C", bound=Savable)


class EndedCaches(Generic[C]):
    """Receives caches from their destructors, and saves those that are passed to `save`.

    `put` may run anywhere, also while a lock is held: it takes no lock and does no work. Saving
    happens on one daemon thread, which an error of a save does not end. In a forked process no
    cache is held.

    Args:
        held_nbytes: memory that caches may hold until they are checked.
    """

    def __init__(self, held_nbytes: int) -> None:
        self._process = os.getpid()
        self._open = True
        self._held_nbytes = held_nbytes
        self._held: deque[C] = deque()
        self._dropped = 0
        self._queue: SimpleQueue[partial[None] | threading.Event | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name="kvconnect-prompt-cache", daemon=True
        )
        self._thread.start()

    @property
    def usable(self) -> bool:
        """Returns whether this object is open and belongs to this process."""
        return self._open and os.getpid() == self._process

    def put(self, cache: C) -> None:
        """Holds `cache` until `take`. A cache beyond the bound is dropped and counted."""
        if not self.usable:
            return
        if sum(one.nbytes for one in tuple(self._held)) + cache.nbytes > self._held_nbytes:
            self._dropped += 1
        else:
            self._held.append(cache)

    def take(self) -> tuple[list[C], int]:
        """Returns and removes all held caches, and the number of dropped ones."""
        taken: list[C] = []
        with suppress(IndexError):
            while True:
                taken.append(self._held.popleft())
        dropped, self._dropped = self._dropped, 0
        return taken, dropped

    def save(self, cache: C, *, whole: bool) -> None:
        """Saves `cache` on the thread. Does not block. Does nothing after `close`."""
        if self.usable:
            self._queue.put(partial(cache.save, whole=whole))

    def wait(self, timeout_s: float) -> bool:
        """Blocks until caches passed to `save` are saved; returns False after `timeout_s`."""
        if not self.usable:
            return True
        reached = threading.Event()
        self._queue.put(reached)
        return reached.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Ends the thread when all caches are saved. Blocks at most `timeout_s`. Idempotent."""
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
                item()
            except Exception as error:  # noqa: BLE001  the next cache must still be saved
                _log.warning("a prompt cache was not saved: %s", error, exc_info=error)
            del item
