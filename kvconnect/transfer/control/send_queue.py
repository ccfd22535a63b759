"""Frames that wait to be sent on one channel."""

from __future__ import annotations

import threading
import time
from collections import deque

__all__ = ["SendQueue"]


class SendQueue:
    """Bounded, from any number of threads to one. Only `take` blocks.

    Args:
        max_nbytes: of all frames that wait; at least the largest frame.
        max_frames: that wait.
    """

    def __init__(self, max_nbytes: int, max_frames: int) -> None:
        self._frames: deque[bytes] = deque()
        self._nbytes = 0
        self._max_nbytes = max_nbytes
        self._max_frames = max_frames
        self._changed = threading.Condition()
        self._closed = False

    def put(self, data: bytes) -> bool:
        """Leaves `data`; False, and it is dropped, if the queue is full or closed."""
        with self._changed:
            fits = self._nbytes + len(data) <= self._max_nbytes
            if self._closed or not fits or len(self._frames) >= self._max_frames:
                return False
            self._frames.append(data)
            self._nbytes += len(data)
            self._changed.notify()
            return True

    def take(self, until: float) -> bytes | None:
        """Returns all frames that wait, joined; blocks until there is one.

        Returns:
            Empty if there is none at `until`, on `time.monotonic`; ``None`` if the queue is closed
            and all was taken.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._frames or self._closed, max(0.0, until - time.monotonic())
            )
            if not self._frames:
                return None if self._closed else b""
            data = b"".join(self._frames)
            self._frames.clear()
            self._nbytes = 0
            return data

    @property
    def closed(self) -> bool:
        """Whether nothing is taken any more."""
        return self._closed

    def close(self) -> None:
        """Takes nothing more; what waits can still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
