"""A copy that was asked for and may still be on its way."""

from __future__ import annotations

import threading
from typing import Any, ClassVar, Protocol

__all__ = ["DONE", "CopyEvent", "Transfer"]


class CopyEvent(Protocol):
    """What is needed of an event behind the copy; `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether it has happened."""

    def synchronize(self) -> None:
        """Block the calling thread until it has happened."""

    def wait(self, stream: Any) -> None:
        """What `stream` is given from now on comes behind it."""


class Transfer:
    """Keeps alive what a copy reads and writes until it is done, also if it is dropped.

    Thread-safe. Without an event it is done from the start: copies between host memories are over
    when they are asked for, and empty ones.

    Args:
        event: happens behind the copy; ``None``: it is over.
        keep: tensors, ids and whatever else the copy uses.
    """

    __slots__ = ("__weakref__", "_event", "_keep")

    _in_flight: ClassVar[set[Transfer]] = set()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, event: CopyEvent | None = None, keep: tuple[object, ...] = ()) -> None:
        self._event = event
        self._keep = keep if event is not None else ()
        if event is not None:
            with self._lock:
                flying = list(self._in_flight)
                self._in_flight.add(self)
            for one in flying:
                one.done()

    def done(self) -> bool:
        """Whether everything is copied. Does not block."""
        event = self._event
        if event is None:
            return True
        if not event.query():
            return False
        self._let_go()
        return True

    def wait(self) -> None:
        """Block the calling thread until everything is copied."""
        event = self._event
        if event is not None:
            event.synchronize()
            self._let_go()

    def wait_on(self, stream: Any) -> None:
        """What `stream` (a `torch.cuda.Stream`) is given from now on comes behind the copy.

        Does not block.
        """
        event = self._event
        if event is not None:
            event.wait(stream)

    def _let_go(self) -> None:
        self._event, self._keep = None, ()
        with self._lock:
            self._in_flight.discard(self)


DONE = Transfer()
"""Of what was over at once; nothing tells one such object from another."""
