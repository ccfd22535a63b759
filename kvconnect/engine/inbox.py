"""How other threads reach the engine's thread, which sleeps while there is nothing to do."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from kvconnect.errors import EngineClosed

__all__ = ["Inbox"]

_Message = TypeVar("_Message")


class Inbox(Generic[_Message]):
    """Messages for one reader, and a bell that wakes it. Nothing but `wait` blocks."""

    def __init__(self) -> None:
        self._messages: list[_Message] = []
        self._changed = threading.Condition()
        self._rung = False
        self._closed = False
        self._cause: BaseException | None = None

    def post(self, message: _Message) -> None:
        """Leave `message` and wake the reader.

        Raises:
            EngineClosed: the reader has stopped; the cause is the error that ended it, if any.
        """
        with self._changed:
            if self._closed:
                what = "the engine was closed" if self._cause is None else "the engine has failed"
                raise EngineClosed(f"{what}: it takes no more requests") from self._cause
            self._messages.append(message)
            self._rung = True
            self._changed.notify()

    def ring(self) -> None:
        """Wake the reader; one that is awake will not sleep next time."""
        with self._changed:
            self._rung = True
            self._changed.notify()

    def take(self) -> list[_Message]:
        """All messages so far, oldest first."""
        with self._changed:
            taken, self._messages = self._messages, []
        return taken

    def wait(self, timeout: float | None) -> bool:
        """Sleep until the bell rings, or rang since the last wait; False if `timeout` s passed."""
        with self._changed:
            rang = self._changed.wait_for(lambda: self._rung, timeout)
            self._rung = False
        return rang

    def close(self, cause: BaseException | None) -> list[_Message]:
        """Accept nothing any more; returns what the reader has not taken."""
        with self._changed:
            self._closed, self._cause = True, cause
        return self.take()
