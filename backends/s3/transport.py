"""The HTTP transport under boto3, which moves bytes between sockets and the caller's buffers.

boto3's own HTTP library reads a body into new memory and copies it from there, and cannot end a
request that another thread waits for.
"""

from __future__ import annotations

import http.client
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, cast
from urllib.parse import SplitResult, urlsplit

from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.exceptions import ConnectionClosedError, ResponseStreamingError

from kvconnect.backends.s3.connections import Connections

MOST_OF_ERROR = 64 << 10
"""The most bytes read of an error. Parsed as XML, each takes many times its memory."""

# The most bytes of a page of a listing.
_MOST_LISTED = 16 << 20
# Views may be of any length, and one system call should not hold a thread for long.
_SEND_NBYTES = 4 << 20
_USUAL_PORTS = {"http": ":80", "https": ":443"}


class Transport:
    """A transport that sends signed requests, and a handler of boto3's event ``before-send``.

    Thread-safe.

    Args:
        connections: the connections that it uses.
    """

    def __init__(self, connections: Connections) -> None:
        self.connections = connections

    def __call__(self, request: AWSPreparedRequest, **_: Any) -> AWSResponse:
        """Returns the response to `request`, its body not yet read.

        Raises:
            ConnectionError, HTTPClientError: botocore's; another attempt may succeed.
            Aborted: the connections were aborted.
        """
        url = urlsplit(request.url)
        connection = self.connections.take(url)
        self.connections.allow(connection, int(request.headers.get("Content-Length", 0)))
        try:
            response = self._exchange(connection, request, url)
        except (OSError, http.client.HTTPException) as error:
            self.connections.drop(connection)
            raise self.connections.error(error, request.url, ConnectionClosedError) from error
        except BaseException:
            self.connections.drop(connection)
            raise
        promised = response.length or 0
        # The length of a part of an object is checked before reading; other lengths are not.
        known = promised if response.status == 206 else min(promised, _most_said(response.status))
        self.connections.allow(connection, known)
        body = _Download(self.connections, connection, response, url=url)
        return AWSResponse(request.url, response.status, cast("Any", response.headers), body)

    def _exchange(
        self, connection: http.client.HTTPConnection, request: AWSPreparedRequest, url: SplitResult
    ) -> http.client.HTTPResponse:
        _begin(connection, request, url, self.connections.forwarding(url))
        sent = 0
        try:
            for chunk in _chunks(request.body):
                left = memoryview(chunk)
                sent += len(left)
                while left:  # not `sendall`, whose timeout is for all bytes together
                    left = left[connection.sock.send(left) :]
        except (BrokenPipeError, ConnectionResetError):
            # The server may have answered early and closed the connection; the answer has the
            # reason.
            response = connection.getresponse()
            response.will_close = True
            return response
        self.connections.sent(connection, sent)
        response = connection.getresponse()
        self.connections.received(connection)
        return response


def _begin(
    connection: http.client.HTTPConnection,
    request: AWSPreparedRequest,
    url: SplitResult,
    forwarding: Mapping[str, str] | None,
) -> None:
    target = f"{url.path or '/'}{'?' if url.query else ''}{url.query}"
    if forwarding is not None:
        target = f"{url.scheme}://{url.netloc.rpartition('@')[2]}{target}"
    connection.putrequest(request.method, target, skip_host=True, skip_accept_encoding=True)
    if "host" not in request.headers:
        # Without the scheme's default port, as in the signature.
        host = url.netloc.rpartition("@")[2].removesuffix(_USUAL_PORTS[url.scheme])
        connection.putheader("Host", host)
    for name, value in (*request.headers.items(), *(forwarding or {}).items()):
        # The body is sent at once, without waiting for "100 Continue".
        if name.lower() != "expect":
            connection.putheader(name, value)
    connection.endheaders()


def _chunks(body: Any) -> Iterator[bytes | memoryview]:
    if isinstance(body, Upload):
        yield from body.chunks()
    elif body:
        yield bytes(body)


def _most_said(status: int) -> int:
    """Returns the most bytes to read of a response with `status` that is no object."""
    return _MOST_LISTED if status < 300 else MOST_OF_ERROR


class Readable(Protocol):
    """The interface of a body, of boto3 or of this module."""

    def readinto(self, view: memoryview, /) -> int:
        """Fills the beginning of `view`; returns the number of bytes, 0 at the end."""


def fill(body: Readable, views: Sequence[memoryview]) -> int:
    """Fills `views` with `body`, one after the other; fewer bytes only where it ends."""
    received = 0
    for view in views:
        filled = 0
        while filled < view.nbytes:
            size = body.readinto(view[filled:])
            if not size:
                return received + filled
            filled += size
        received += filled
    return received


class Upload:
    """The bytes of several buffers, one after the other, as a body for boto3: no copy is made.

    Args:
        views: of bytes.
    """

    def __init__(self, views: Sequence[memoryview | bytes]) -> None:
        self._views: list[memoryview] = [memoryview(view) for view in views]
        self._nbytes = sum(view.nbytes for view in self._views)
        self._at = 0

    def __len__(self) -> int:
        return self._nbytes

    def chunks(self) -> Iterator[memoryview]:
        """Yields all bytes, in pieces."""
        for view in self._views:
            for start in range(0, view.nbytes, _SEND_NBYTES):
                yield view[start : start + _SEND_NBYTES]

    def read(self, size: int = -1) -> bytes:
        """Returns up to `size` bytes from the position, for callers that hash or copy."""
        end = self._nbytes if size < 0 else min(self._at + size, self._nbytes)
        parts, start = [], 0
        for view in self._views:
            low, high = max(self._at - start, 0), min(end - start, view.nbytes)
            if low < high:
                parts.append(view[low:high])
            start += view.nbytes
        self._at = end
        return b"".join(parts)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Sets the position, as in a file."""
        self._at = (
            offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._nbytes}[whence]
        )
        return self._at

    def tell(self) -> int:
        """Returns the position."""
        return self._at


class _Download:
    """The body of a response.

    Once everything was read, its connection serves other requests; otherwise `close` closes it.

    Args:
        connections: the owner of `connection`.
        connection: the connection of the response.
        response: the response whose body is read.
        url: the URL of the request.
    """

    def __init__(
        self,
        connections: Connections,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
        *,
        url: SplitResult,
    ) -> None:
        self._connections = connections
        self._connection: http.client.HTTPConnection | None = connection
        self._response = response
        self._url = url

    def readinto(self, view: memoryview) -> int:
        """Fills the beginning of `view`; returns the number of bytes, 0 at the end.

        Raises:
            HTTPClientError: `view` is undefined.
        """
        try:
            size = self._response.readinto(view)
        except (OSError, http.client.HTTPException) as error:
            raise self._failed(error) from error
        self._done_if_read()
        return size

    def read(self, size: int | None = None) -> bytes:
        """Returns up to `size` bytes, or all.

        Raises:
            HTTPClientError: the response broke off.
        """
        try:
            data = self._response.read(size)
            if size is not None and len(data) < size and self._response.length:
                raise http.client.IncompleteRead(data, self._response.length)
        except (OSError, http.client.HTTPException) as error:
            raise self._failed(error) from error
        self._done_if_read()
        return data

    def stream(self) -> Iterator[bytes]:
        """Yields the whole body; of a long error only the beginning.

        Raises:
            HTTPClientError: the body broke off, or is no error and longer than boto3 may read.
        """
        most = _most_said(self._response.status)
        is_error = most == MOST_OF_ERROR
        if is_error or (self._response.length or 0) <= most:
            said = self.read(most if is_error else most + 1)
            self._drop()  # not if it was given back
            if len(said) <= most:
                yield said
                return
        raise self._failed(ValueError(f"more than {most} bytes, and no object"))

    def readable(self) -> bool:
        """Returns true, as a readable file does."""
        return True

    def close(self) -> None:
        """Returns the connection for further requests if nothing is left to read, or closes it."""
        if self._response.length == 0 and self._connection is not None:
            self.read()  # reads no byte, but marks the end
        self._drop()

    def _failed(self, error: Exception) -> Exception:
        self._drop()
        return self._connections.error(error, self._url.geturl(), ResponseStreamingError)

    def _done_if_read(self) -> None:
        if not self._response.isclosed() or self._connection is None:
            return
        if self._response.will_close or self._response.length:
            self._drop()
        else:
            connection, self._connection = self._connection, None
            self._connections.give_back(self._url, connection)

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._response.close()
            self._connections.drop(connection)
