"""How long something that several threads use stays open."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Lifetime"]


class Lifetime:
    """Calls `close` once, when it has ended and is not in use. Thread-safe."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._lock = threading.Lock()
        self._users = 0
        self._ended = False

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Nothing is closed meanwhile, also if `end` is called."""
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._ended and not self._users:
                    self._close()

    def end(self) -> None:
        """Close as soon as it is not in use. The second time does nothing."""
        with self._lock:
            if not self._ended:
                self._ended = True
                if not self._users:
                    self._close()
