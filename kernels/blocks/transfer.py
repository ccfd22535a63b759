"""A copy that was requested and may not be finished."""

from __future__ import annotations

import threading
from typing import Any, ClassVar, Protocol

__all__ = ["DONE", "CopyEvent", "Transfer"]


class CopyEvent(Protocol):
    """The methods used of an event behind the copy; `torch.cuda.Event` has them."""

    def query(self) -> bool:
        """Returns whether it has happened."""

    def synchronize(self) -> None:
        """Blocks the calling thread until it has happened."""

    def wait(self, stream: Any) -> None:
        """Makes later work of `stream` wait for it."""


class Transfer:
    """A copy that keeps its memory alive until it is done, also if this object is dropped.

    Thread-safe. Without an event it is done from the start: copies between host memories are done
    when the call returns, and so are empty ones.

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
        """Returns whether everything is copied. Does not block."""
        event = self._event
        if event is None:
            return True
        if not event.query():
            return False
        self._let_go()
        return True

    def wait(self) -> None:
        """Blocks the calling thread until everything is copied."""
        event = self._event
        if event is not None:
            event.synchronize()
            self._let_go()

    def wait_on(self, stream: Any) -> None:
        """Makes later work of `stream` (a `torch.cuda.Stream`) wait for the copy.

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
"""The transfer that was done at once; all such transfers are alike."""
