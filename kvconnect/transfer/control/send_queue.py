"""A queue of payloads that become frames in order and wait to be sent."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

__all__ = ["SendQueue"]


class SendQueue:
    """A bounded queue from any number of threads to one. Only `take` blocks.

    Args:
        max_nbytes: the most bytes of waiting frames; at least the largest frame.
        max_frames: the most waiting frames.
        frame: makes the next frame of a payload; called by one thread at a time.
    """

    def __init__(self, max_nbytes: int, max_frames: int, frame: Callable[[bytes], bytes]) -> None:
        self._frames: deque[bytes] = deque()
        self._nbytes = 0
        self._max_nbytes = max_nbytes
        self._max_frames = max_frames
        self._frame = frame
        self._changed = threading.Condition()
        self._closed = False
        self._taken = False  # the caller of `take` sends its frames, which no other may overtake

    def put(self, payload: bytes) -> bool:
        """Appends `payload`; drops it and returns False if the queue is full or closed."""
        with self._changed:
            return self._put(payload)

    def send(self, payload: bytes, write: Callable[[bytes], int]) -> bool:
        """Makes `write` send `payload` at once if the queue is empty; else acts as `put`.

        Bytes that `write` does not accept wait in the queue.

        Args:
            payload: the payload of one frame.
            write: sends the first bytes of its argument and returns their number; must not block.
                Called on this thread, one call at a time, and never while the caller of `take`
                sends.

        Returns:
            False if the queue is full or closed.
        """
        with self._changed:
            if self._frames or self._taken or self._closed:
                return self._put(payload)
            data = self._frame(payload)
            sent = write(data)
            if sent < len(data):
                self._keep(data[sent:])
            return True

    def _put(self, payload: bytes) -> bool:
        # A frame that is made must be sent: the codes of later frames depend on it.
        fits = self._nbytes + len(payload) <= self._max_nbytes
        if self._closed or not fits or len(self._frames) >= self._max_frames:
            return False
        self._keep(self._frame(payload))
        return True

    def _keep(self, data: bytes) -> None:
        self._frames.append(data)
        self._nbytes += len(data)
        self._changed.notify()

    def take(self, until: float) -> bytes | None:
        """Returns all waiting frames, joined; blocks until there is one.

        The caller has sent everything that an earlier call returned.

        Returns:
            The frames; empty if there is none at `until` (`time.monotonic`). ``None`` if the queue
            is closed and empty.
        """
        with self._changed:
            self._taken = False
            self._changed.wait_for(
                lambda: self._frames or self._closed, max(0.0, until - time.monotonic())
            )
            self._taken = True
            if not self._frames:
                return None if self._closed else b""
            data = b"".join(self._frames)
            self._frames.clear()
            self._nbytes = 0
            return data

    @property
    def closed(self) -> bool:
        """Returns whether the queue is closed and accepts nothing more."""
        return self._closed

    def close(self) -> None:
        """Closes the queue. Waiting frames can still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
