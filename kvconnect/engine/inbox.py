"""The inbox of the engine's thread, which sleeps while there is no work."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from kvconnect.engine.request.owner import Owner
from kvconnect.errors import EngineClosed

_Message = TypeVar("_Message")


class Inbox(Generic[_Message]):
    """The messages for one reader, and a bell that wakes it. Only `wait` blocks.

    Attributes:
        owner: the process of its reader.
    """

    def __init__(self) -> None:
        self._messages: deque[_Message] = deque()
        self._changed = threading.Condition()
        self._rung = False
        self._closed = False
        self._cause: BaseException | None = None
        self.owner = Owner()

    def post(self, message: _Message) -> None:
        """Adds `message` and wakes the reader.

        Raises:
            EngineClosed: the reader has stopped (the cause is the error that ended it, if any), or
                is in another process.
        """
        self.owner.check()
        with self._changed:
            self._check_not_closed()
            self._messages.append(message)
            self._rung = True
            self._changed.notify()

    def check_open(self) -> None:
        """Checks that `post` works.

        Raises:
            EngineClosed: as `post` does.
        """
        self.owner.check()
        self._check_not_closed()

    def _check_not_closed(self) -> None:
        if self._closed:
            what = "the engine was closed" if self._cause is None else "the engine has failed"
            raise EngineClosed(f"{what}: it takes no more requests") from self._cause

    def ring(self) -> None:
        """Wakes the reader; if it is awake, its next `wait` returns at once."""
        with self._changed:
            self._rung = True
            self._changed.notify()

    def take(self) -> Iterator[_Message]:
        """Yields the messages so far, oldest first; removes each when it is yielded."""
        for _ in range(len(self._messages)):
            with self._changed:
                if not self._messages:  # closed meanwhile
                    return
                message = self._messages.popleft()
            yield message

    def wait(self, timeout: float | None) -> bool:
        """Sleeps until the bell rings, or rang since the last wait; False if `timeout` s passed."""
        with self._changed:
            rang = self._changed.wait_for(lambda: self._rung, timeout)
            self._rung = False
        return rang

    def close(self, cause: BaseException | None) -> list[_Message]:
        """Closes the inbox; returns the remaining messages. The first cause is kept."""
        with self._changed:
            self._closed, self._cause = True, self._cause or cause
            left, self._messages = list(self._messages), deque()
        return left
