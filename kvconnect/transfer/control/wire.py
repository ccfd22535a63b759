"""Frames over a TCP socket: four bytes of length, big-endian, then so many bytes."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from contextlib import suppress

from kvconnect.errors import BadMessage

__all__ = ["Wire", "WireClosed", "WireTimeout", "frame"]

_LENGTH = struct.Struct(">I")
_READ_NBYTES = 64 << 10
# Between two looks at the clock, which show whether this process ran meanwhile.
_LOOK_S = 0.25


class WireClosed(ConnectionError):
    """The connection is closed, by either side."""


class WireTimeout(TimeoutError):
    """Nothing whole came, or not all could be sent, in time."""


def frame(payload: bytes) -> bytes:
    """`payload` with its length before it."""
    return _LENGTH.pack(len(payload)) + payload


class Wire:
    """One connection. One thread may read while another writes.

    Memory follows what was really received, not what a length promises.

    Args:
        sock: connected; belongs to this from now on.
        limit: bytes of a frame that comes in; more is a `BadMessage`.
        silence_s: so long may what was sent stay unacknowledged before the kernel gives up.

    Attributes:
        limit: may be changed between two reads.
        heard_at: when bytes last came in, on `time.monotonic`.
    """

    def __init__(self, sock: socket.socket, *, limit: int, silence_s: float) -> None:
        sock.settimeout(0)
        with suppress(OSError):  # a closed one is found at the first read
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence_s * 1000))
        self._sock = sock
        self._buffer = bytearray()
        self._closing = threading.Event()
        self.limit = limit
        self.heard_at = time.monotonic()

    def read(self, until: float) -> bytes:
        """Returns the payload of the next frame; blocks until then.

        Args:
            until: on `time.monotonic`. What came in by then is kept for the next call. Later by
                as long as this process did not run while it waited.

        Raises:
            WireTimeout: it is not whole at `until`.
            WireClosed: the connection has ended.
            BadMessage: the frame is longer than `limit`. The connection is of no use any more.
        """
        while (payload := self._take()) is None:
            self._wait(select.POLLIN, until)
            try:
                data = self._sock.recv(_READ_NBYTES)
            except BlockingIOError:
                continue
            except OSError as error:
                raise WireClosed(f"the connection broke: {error.strerror or error}") from error
            if not data:
                raise WireClosed("the peer closed the connection")
            self.heard_at = time.monotonic()
            self._buffer += data
        return payload

    def write(self, data: bytes, until: float) -> None:
        """Sends all of `data`, whole frames; blocks until the kernel has it.

        Raises:
            WireTimeout, WireClosed: some of it may be sent. The connection is of no use any more.
        """
        left = memoryview(data)
        while left:
            try:
                left = left[self._sock.send(left) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, until)
            except OSError as error:
                raise WireClosed(f"the connection broke: {error.strerror or error}") from error

    def write_now(self, data: bytes) -> int:
        """Sends what of `data` the kernel takes at once; returns how many bytes. Never blocks.

        None of a connection that has ended: `write` says so.
        """
        try:
            return self._sock.send(data)
        except OSError:
            return 0

    def shut(self) -> None:
        """Ends the connection, and what reads or writes in other threads; does not block."""
        self._closing.set()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def shut_writing(self) -> None:
        """Tells the peer that nothing more comes; what it sends can still be read."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """`shut`, and gives the socket back; no thread may be reading or writing."""
        self.shut()
        self._sock.close()

    def _take(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > self.limit:
            raise BadMessage(f"a frame of {length} bytes; at most {self.limit} are taken")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return payload

    def _wait(self, event: int, until: float) -> None:
        poll = select.poll()
        poll.register(self._sock, event)
        while True:
            if self._closing.is_set():
                raise WireClosed("the connection was closed")
            looked_at = time.monotonic()
            left_s = min(max(0.0, until - looked_at), _LOOK_S)
            if poll.poll(left_s * 1000):
                return
            now = time.monotonic()
            # While this process was stopped, or got no time, the peer may have been, too: a machine
            # that was paused for a while.
            until += max(0.0, now - looked_at - left_s)
            if now >= until:
                raise WireTimeout("nothing came" if event == select.POLLIN else "nothing was taken")
