"""Bodies of answers: read into the reader's memory, and then the connection is free again."""

from __future__ import annotations

import http.client
import select
import socket
import ssl
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from kvconnect.backends.s3_transport import Transport

__all__ = ["MOST_SAID", "HttpBody", "PlainBody", "readable"]

# Of answers that are no objects: errors and pages of a listing.
MOST_SAID = 16 << 20
# In the kernel's `struct tcp_info`: milliseconds since data came.
_QUIET = struct.Struct("52xI")


class PlainBody:
    """A body of known length, received straight into the reader's memory.

    Its connection goes back to the transport once everything was read; else `close` closes it.

    Args:
        transport: which the connection belongs to.
        connection: it brings the body.
        place: scheme and address of `connection`.
        url: what was asked for.
        begun: the first bytes, which came already.
        nbytes: of the whole body; at least 1.
    """

    def __init__(
        self,
        transport: Transport,
        connection: http.client.HTTPConnection,
        place: tuple[str, str],
        url: str,
        begun: bytes,
        nbytes: int,
    ) -> None:
        self._transport = transport
        self._connection: http.client.HTTPConnection | None = connection
        self._place = place
        self._url = url
        self._begun = memoryview(begun)
        self._left = nbytes

    def readinto(self, view: memoryview) -> int:
        """Fill `view`; less, or nothing, at the end of the body."""
        connection = self._connection
        if connection is None:
            return 0
        view = view[: self._left]
        size = min(len(self._begun), view.nbytes)
        view[:size] = self._begun[:size]
        self._begun = self._begun[size:]
        try:
            size += _receive(connection.sock, view[size:], self._transport.read_timeout)
        except OSError as error:
            self.close()
            raise self._transport.body_error(error, self._url) from error
        self._left -= size
        if not self._left:
            self._connection = None
            self._transport.give_back(self._place, connection)
        elif size < view.nbytes:
            self.close()
        return size

    def read(self, size: int) -> bytes:
        """The next `size` bytes, or all that are left."""
        data = bytearray(min(size, self._left))
        return bytes(data[: self.readinto(memoryview(data))])

    def close(self) -> None:
        """Let go of the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._transport.drop(connection)


class HttpBody:
    """A response's body as Python's HTTP library reads it.

    Its connection goes back to the transport once everything was read; else `close` closes it.
    """

    def __init__(
        self,
        transport: Transport,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
        place: tuple[str, str],
        url: str,
    ) -> None:
        self._transport = transport
        self._connection: http.client.HTTPConnection | None = connection
        self._response = response
        self._place = place
        self._url = url

    def readinto(self, view: memoryview) -> int:
        """Fill the beginning of `view`; 0 at the end."""
        try:
            size = self._response.readinto(view)
        except (OSError, http.client.HTTPException) as error:
            self._drop()
            raise self._transport.body_error(error, self._url) from error
        # A socket without a byte in time; the types do not know of that.
        if cast("int | None", size) is None:
            self._drop()
            raise self._transport.body_error(None, self._url)
        self._done_if_read()
        return size

    def read(self, size: int | None = None) -> bytes:
        """Up to `size` bytes, or all."""
        try:
            data = self._response.read(size)
        except (OSError, http.client.HTTPException) as error:
            self._drop()
            raise self._transport.body_error(error, self._url) from error
        self._done_if_read()
        return data or b""

    def stream(self) -> Iterator[bytes]:
        """All of it, unless it is longer than what boto3 looks into this way."""
        promised = self._response.length
        if (promised or 0) <= MOST_SAID:
            said = self.read(MOST_SAID + 1 if promised is None else None)
            self._drop()  # not if it was given back
            if len(said) <= MOST_SAID:
                yield said
                return
        self._drop()
        error = ValueError(f"more than {MOST_SAID} bytes, and no object")
        raise self._transport.body_error(error, self._url)

    def readable(self) -> bool:
        """As of a file."""
        return True

    def close(self) -> None:
        """Let go of the connection."""
        if self._response.length == 0 and self._connection is not None:
            self.read()  # nothing; but now it knows that it is at its end
        self._drop()

    def _done_if_read(self) -> None:
        if not self._response.isclosed() or self._connection is None:
            return
        connection, self._connection = self._connection, None
        if self._response.will_close or connection.sock is None or self._response.length:
            self._transport.drop(connection)
        else:
            self._transport.give_back(self._place, connection)

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._response.close()
            self._transport.drop(connection)


def readable(sock: socket.socket, seconds: float = 0.0) -> bool:
    """Whether there is something to read, or the end, within so many seconds."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(seconds * 1e3))


def _receive(sock: socket.socket, view: memoryview, read_timeout: float) -> int:
    """Fill `view`; less at the end of what comes.

    Raises:
        OSError: no byte came in time, or the connection broke.
    """
    # The kernel fills it in one call: each call that returns waits for the interpreter's lock.
    flags = 0 if isinstance(sock, ssl.SSLSocket) else socket.MSG_WAITALL
    filled = 0
    while filled < view.nbytes:
        size = sock.recv_into(view[filled:], 0, flags)
        if not size:
            break
        filled += size
        if flags and filled < view.nbytes:
            _wait_for_more(sock, read_timeout)
    return filled


def _wait_for_more(sock: socket.socket, read_timeout: float) -> None:
    # The time of that call ended, somewhere between two bytes; the wait for the next one goes on.
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _QUIET.size)
    quiet_s = _QUIET.unpack(info)[0] / 1e3
    if not readable(sock, max(0.0, read_timeout - quiet_s)):
        raise TimeoutError
