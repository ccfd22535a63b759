"""A copy that may still run."""

from __future__ import annotations

import threading
from typing import Any, ClassVar, Protocol


class CopyEvent(Protocol):
    """An event that happens after a copy, with the methods of `torch.cuda.Event` used here."""

    def query(self) -> bool:
        """Returns whether the event has happened. Does not block."""

    def synchronize(self) -> None:
        """Blocks the calling thread until the event has happened."""

    def wait(self, stream: Any) -> None:
        """Makes later work of `stream` wait for the event. Does not block."""


class Transfer:
    """A copy that may still run. Its memory stays alive until it is done.

    That holds even if no reference to this object is kept. Thread-safe. A copy between host
    memories and an empty copy have no event: they are done when the call returns.

    Args:
        event: happens when the copy is done; ``None`` if the copy is done already.
        keep: tensors, ids and other objects that the copy uses.
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
        self._release()
        return True

    def wait(self) -> None:
        """Blocks the calling thread until everything is copied."""
        event = self._event
        if event is not None:
            event.synchronize()
            self._release()

    def wait_on(self, stream: Any) -> None:
        """Makes later work of `stream` (a `torch.cuda.Stream`) wait for the copy.

        Does not block.
        """
        event = self._event
        if event is not None:
            event.wait(stream)

    def _release(self) -> None:
        self._event, self._keep = None, ()
        with self._lock:
            self._in_flight.discard(self)


DONE = Transfer()
"""The transfer of every copy that was done when its call returned."""
