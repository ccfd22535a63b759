"""The frames over a TCP socket: four bytes of length, big-endian, then as many bytes.

The bytes of a sealed frame are a guard of its length, the code of its payload, and the payload.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from contextlib import suppress

from kvconnect.errors import BadMessage
from kvconnect.trace import count
from kvconnect.transfer.acceptor import shut
from kvconnect.transfer.seal import CODE_NBYTES, GUARD_NBYTES, Seal

_LENGTH = struct.Struct(">I")
_SEAL_NBYTES = GUARD_NBYTES + CODE_NBYTES
_READ_NBYTES = 64 << 10
# The longest wait between two readings of the clock, which show whether this process ran meanwhile.
_LOOK_S = 0.25


class WireClosed(ConnectionError):
    """The error that the connection was closed by either side."""


class WireTimeout(TimeoutError):
    """The error that a frame was not received or sent completely in time."""


def frame(payload: bytes) -> bytes:
    """Returns `payload` with its length before it."""
    return _LENGTH.pack(len(payload)) + payload


class Wire:
    """A connection that carries frames. One thread may read while another writes.

    Memory use depends on the bytes received, not on the length that a frame claims. Frames are
    plain until `seal` is called.

    Args:
        sock: a connected socket; the `Wire` owns it from now on.
        limit: the largest incoming frame in bytes; a larger one is a `BadMessage`.
        silence_s: the kernel ends the connection if sent bytes stay unacknowledged for this long.

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
        self._outgoing: Seal | None = None
        self._incoming: Seal | None = None
        self.limit = limit
        self.heard_at = time.monotonic()

    def seal(self, outgoing: Seal, incoming: Seal) -> None:
        """Makes `frame` seal with `outgoing`, and `read` check with `incoming`, from now on."""
        self._outgoing, self._incoming = outgoing, incoming

    def frame(self, payload: bytes) -> bytes:
        """Returns the next frame to write, of `payload`.

        The peer takes frames in the order in which they were made. One thread may call this at a
        time.
        """
        if self._outgoing is None:
            return frame(payload)
        length = _LENGTH.pack(_SEAL_NBYTES + len(payload))
        guard = self._outgoing.guard(length)
        return length + guard + self._outgoing.code(payload) + payload

    def read(self, until: float) -> bytes:
        """Returns the payload of the next frame; blocks until then.

        Args:
            until: the deadline, on `time.monotonic`. It is extended by the time that this process
                did not run while it waited. Bytes received by then are kept for the next call.

        Raises:
            WireTimeout: the frame is not complete at `until`.
            WireClosed: the connection has ended.
            BadMessage: the frame is longer than `limit`, or it is not the next one that the peer
                sent, unchanged. The connection cannot be used any more.
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
        """Sends all of `data`, whole frames; blocks until the kernel has accepted all.

        Raises:
            WireTimeout: the kernel has not accepted all at `until`, extended as in `read`.
            WireClosed: the connection has ended.

        After either, some of `data` may be sent, and the connection cannot be used any more.
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
        """Sends the bytes of `data` that the kernel accepts at once and returns their number.

        Never blocks. Returns 0 if the connection has ended; `write` reports that.
        """
        try:
            return self._sock.send(data)
        except OSError:
            return 0

    def shut(self) -> None:
        """Ends the connection, and reads and writes in other threads. Does not block."""
        self._closing.set()
        shut(self._sock)

    def shut_writing(self) -> None:
        """Ends the sending direction. The peer's data can still be read."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Calls `shut` and closes the socket. No thread may be reading or writing."""
        self.shut()
        self._sock.close()

    def _take(self) -> bytes | None:
        seal = self._incoming
        start = _LENGTH.size if seal is None else _LENGTH.size + _SEAL_NBYTES
        if len(self._buffer) < start:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if seal is not None:
            guard = self._buffer[_LENGTH.size : _LENGTH.size + GUARD_NBYTES]
            if guard != seal.guard(bytes(self._buffer[: _LENGTH.size])):
                raise _damaged()
        end = _LENGTH.size + length
        if not 0 <= end - start <= self.limit:
            raise BadMessage(f"a frame of {length} bytes; at most {self.limit} are taken")
        if len(self._buffer) < end:
            return None
        code = bytes(self._buffer[start - CODE_NBYTES : start])
        payload = bytes(self._buffer[start:end])
        del self._buffer[:end]
        if seal is not None and not seal.fits(code, payload):
            raise _damaged()
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
            # If this process did not run, the peer may not have run either: the machine was paused.
            until += max(0.0, now - looked_at - left_s)
            if now >= until:
                raise WireTimeout("nothing came" if event == select.POLLIN else "nothing was taken")


def _damaged() -> BadMessage:
    count("transfer.control.damaged")
    return BadMessage("a frame is damaged, repeated, or not the next one")
