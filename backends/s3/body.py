"""Bodies of answers: read into the reader's memory, and then the connection is free again."""

from __future__ import annotations

import http.client
import select
import socket
import ssl
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from kvconnect.backends.s3.transport import Transport

__all__ = ["MOST_SAID", "HttpBody", "PlainBody", "readable"]

# Of answers that are no objects: errors and pages of a listing.
MOST_SAID = 16 << 20
# The kernel takes no more than 1024.
_VIEWS_AT_ONCE = 512
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
        return self.fill([view])

    def fill(self, views: Sequence[memoryview]) -> int:
        """Fill `views`, one after the other; fewer bytes only at the end of the body.

        Raises:
            HTTPClientError: `views` are undefined.
        """
        connection = self._connection
        if connection is None:
            return 0
        wanted, _ = _split(views, self._left)
        here, coming = _split(wanted, len(self._begun))
        size = 0
        for view in here:
            view[:] = self._begun[size : size + view.nbytes]
            size += view.nbytes
        self._begun = self._begun[size:]
        try:
            size += _receive(connection.sock, coming, self._transport.read_timeout)
        except OSError as error:
            self.close()
            raise self._transport.body_error(error, self._url) from error
        self._left -= size
        if not self._left:
            self._connection = None
            self._transport.give_back(self._place, connection)
        elif size < sum(view.nbytes for view in wanted):
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


def _split(views: Sequence[memoryview], nbytes: int) -> tuple[list[memoryview], list[memoryview]]:
    """The first `nbytes` bytes of `views`, and those behind; the first of these is not empty."""
    for number, view in enumerate(views):
        if nbytes < view.nbytes:
            head = [view[:nbytes]] if nbytes else []
            return [*views[:number], *head], [view[nbytes:], *views[number + 1 :]]
        nbytes -= view.nbytes
    return list(views), []


def _receive(sock: socket.socket, views: Sequence[memoryview], read_timeout: float) -> int:
    """Fill `views`, one after the other; fewer bytes only at the end of what comes.

    Raises:
        OSError: no byte came in time, or the connection broke.
    """
    received = 0
    while views:
        if isinstance(sock, ssl.SSLSocket):
            size = wanted = sock.recv_into(views[0])
        else:
            # The kernel fills them in one call: each that returns waits for the interpreter's lock.
            now = views[:_VIEWS_AT_ONCE]
            wanted = sum(view.nbytes for view in now)
            size = sock.recvmsg_into(now, 0, socket.MSG_WAITALL)[0]
        if not size:
            break
        received += size
        if size < wanted:
            _wait_for_more(sock, read_timeout)
        _, views = _split(views, size)
    return received


def _wait_for_more(sock: socket.socket, read_timeout: float) -> None:
    # The time of that call ended, somewhere between two bytes; the wait for the next one goes on.
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _QUIET.size)
    quiet_s = _QUIET.unpack(info)[0] / 1e3
    if not readable(sock, max(0.0, read_timeout - quiet_s)):
        raise TimeoutError
