"""HTTP under boto3: bytes go straight between sockets and the caller's buffers.

boto3 signs and retries; what it hands to its own HTTP library comes here instead, through its event
``before-send``. Its library reads a body into new memory and copies it from there, and gives nobody
a way to end a request that another thread waits for.
"""

from __future__ import annotations

import http.client
import math
import socket
import ssl
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast
from urllib.parse import SplitResult, urlsplit

from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.exceptions import (
    ConnectionClosedError,
    ConnectTimeoutError,
    EndpointConnectionError,
    ReadTimeoutError,
    ResponseStreamingError,
    SSLError,
)

from kvconnect.backends.s3.answer import PlainAnswer, receive_head, resumed
from kvconnect.backends.s3.body import MOST_SAID, HttpBody, PlainBody, readable
from kvconnect.backends.s3.reply import Reply
from kvconnect.backends.s3.signature import host_of
from kvconnect.backends.s3.upload import Upload

__all__ = ["Aborted", "Transport"]

# Bytes per second; a request may take this long, beside the timeout.
_SLOWEST = 256 << 10


class Aborted(Exception):
    """The transport was closed. boto3 does not know this error, so it does not try again."""


class Transport:
    """Sends boto3's requests on connections of its own. Thread-safe.

    Args:
        connect_timeout: seconds.
        read_timeout: seconds without a byte.
        tls: for ``https``; ``None``: Python's own.

    Attributes:
        read_timeout: as given.
    """

    def __init__(
        self, *, connect_timeout: float, read_timeout: float, tls: ssl.SSLContext | None
    ) -> None:
        self._connect_timeout = connect_timeout
        self.read_timeout = read_timeout
        self._tls = tls
        self._lock = threading.Lock()
        self._idle: defaultdict[tuple[str, str], list[http.client.HTTPConnection]]
        self._idle = defaultdict(list)
        # Every connection, and when the request it serves must have ended.
        self._open: dict[http.client.HTTPConnection, float] = {}
        self._aborted = False

    def __call__(self, request: AWSPreparedRequest, **_: Any) -> AWSResponse:
        """The response to `request`, its body not yet read.

        Raises:
            HTTPClientError: what boto3 retries.
            Aborted: `abort` was called.
        """
        url = urlsplit(request.url)
        nbytes = int(request.headers.get("Content-Length", 0))
        with self._asking(url, request.url, nbytes) as connection:
            response = _exchange(connection, request, url)
        body = self._body(connection, response, url, request.url)
        return AWSResponse(request.url, response.status, cast("Any", response.headers), body)

    def get(self, url: SplitResult, request: bytes) -> Reply:
        """The answer to a whole `request`, without a body of its own, for the service of `url`.

        Raises:
            HTTPClientError: what boto3 retries.
            Aborted: `abort` was called.
        """
        told = url.geturl()
        with self._asking(url, told, 0) as connection:
            connection.sock.sendall(request)
            data = receive_head(connection.sock)
            answer = PlainAnswer.of(data) or resumed(connection.sock, data)
        if isinstance(answer, PlainAnswer):
            self._allow(connection, answer.nbytes)
            place = (url.scheme, url.netloc)
            part = PlainBody(self, connection, place, told, answer.begun, answer.nbytes)
            return Reply(206, answer.headers, part)
        headers = {name.lower(): value for name, value in answer.headers.items()}
        return Reply(answer.status, headers, self._body(connection, answer, url, told))

    @contextmanager
    def _asking(
        self, url: SplitResult, told: str, nbytes: int
    ) -> Iterator[http.client.HTTPConnection]:
        """A connection for one request of so many bytes, until its answer begins."""
        connection = self._connection(url)
        started = time.monotonic()
        self._allow(connection, nbytes)
        try:
            yield connection
        except BaseException as error:
            self.drop(connection)
            late = time.monotonic() - started >= self.read_timeout
            raise self._translated(error, told, late=late) from error

    def _body(
        self,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
        url: SplitResult,
        told: str,
    ) -> HttpBody:
        promised = response.length or 0
        # A part of an object is looked at before it is read; what anything else promises is not.
        self._allow(connection, promised if response.status == 206 else min(promised, MOST_SAID))
        return HttpBody(self, connection, response, (url.scheme, url.netloc), told)

    def abort(self) -> None:
        """End every request in flight with an error, refuse new ones, close every connection."""
        with self._lock:
            self._aborted = True
            idle = [connection for place in self._idle.values() for connection in place]
            self._idle.clear()
            busy = self._open.keys() - set(idle)
        for connection in idle:
            self.drop(connection)
        for connection in busy:
            _shut_down(connection)

    def end_overdue(self) -> None:
        """End requests that take far longer than their size explains: a server that drips bytes.

        Each byte in time keeps a socket's timeout from ever coming.
        """
        now = time.monotonic()
        with self._lock:
            overdue = [connection for connection, end in self._open.items() if now >= end]
        for connection in overdue:
            _shut_down(connection)

    @property
    def num_open(self) -> int:
        """Connections there are."""
        return len(self._open)

    def give_back(self, place: tuple[str, str], connection: http.client.HTTPConnection) -> None:
        """`connection` has nothing left to read and may serve another request."""
        with self._lock:
            if not self._aborted:
                self._idle[place].append(connection)
                self._open[connection] = math.inf
                return
        self.drop(connection)

    def drop(self, connection: http.client.HTTPConnection) -> None:
        """Close `connection`."""
        with self._lock:
            self._open.pop(connection, None)
        connection.close()

    def _connection(self, url: SplitResult) -> http.client.HTTPConnection:
        while True:
            with self._lock:
                if self._aborted:
                    raise Aborted("the store is closed")
                idle = self._idle[url.scheme, url.netloc]
                connection = idle.pop() if idle else None
            if connection is None:
                return self._connect(url)
            # Something to read before anything was asked: the server has closed it.
            if not readable(connection.sock):
                return connection
            self.drop(connection)

    def _connect(self, url: SplitResult) -> http.client.HTTPConnection:
        host, port, timeout = url.hostname or "", url.port, self._connect_timeout
        connection: http.client.HTTPConnection
        if url.scheme == "https":
            connection = http.client.HTTPSConnection(host, port, timeout=timeout, context=self._tls)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=timeout)
        address = f"{url.scheme}://{url.netloc}"
        try:
            connection.connect()
        except TimeoutError as error:
            connection.close()
            raise ConnectTimeoutError(endpoint_url=address, error=error) from error
        except ssl.SSLError as error:
            connection.close()
            raise SSLError(endpoint_url=address, error=error) from error
        except OSError as error:
            connection.close()
            raise EndpointConnectionError(endpoint_url=address, error=error) from error
        _set_timeout(connection.sock, self.read_timeout)
        with self._lock:
            if not self._aborted:
                self._open[connection] = math.inf
                return connection
        connection.close()
        raise Aborted("the store is closed")

    def _allow(self, connection: http.client.HTTPConnection, nbytes: int) -> None:
        self._open[connection] = time.monotonic() + self.read_timeout + nbytes / _SLOWEST

    def _translated(self, error: BaseException, url: str, *, late: bool) -> BaseException:
        if self._aborted:
            return Aborted("the store is closed")
        if late or isinstance(error, (TimeoutError, BlockingIOError)):
            return ReadTimeoutError(endpoint_url=url, error=error)
        if isinstance(error, (OSError, http.client.HTTPException)):
            return ConnectionClosedError(endpoint_url=url, error=error)
        return error

    def body_error(self, error: Exception | None, url: str) -> Exception:
        """What to raise for a body that ended with `error`, or (``None``) without a byte in time.

        Named as boto3 names it.
        """
        if self._aborted:
            return Aborted("the store is closed")
        if error is None or isinstance(error, (TimeoutError, BlockingIOError)):
            return ReadTimeoutError(endpoint_url=url, error=error)
        return ResponseStreamingError(error=error)


def _exchange(
    connection: http.client.HTTPConnection, request: AWSPreparedRequest, url: SplitResult
) -> http.client.HTTPResponse:
    target = f"{url.path or '/'}{'?' if url.query else ''}{url.query}"
    connection.putrequest(request.method, target, skip_host=True, skip_accept_encoding=True)
    headers = dict(request.headers.items())
    names = {name.lower() for name in headers}
    if "host" not in names:
        connection.putheader("Host", host_of(url))
    for name, value in headers.items():
        # The body is sent at once: nobody waits for "100 Continue".
        if name.lower() != "expect":
            connection.putheader(name, value)
    body = request.body
    if isinstance(body, str):
        body = body.encode()
    if isinstance(body, (bytes, bytearray)) or body is None:
        connection.endheaders(bytes(body) if body else None)
        return connection.getresponse()
    connection.endheaders()
    try:
        for chunk in _chunks(body):
            connection.sock.sendall(chunk)
    except (BrokenPipeError, ConnectionResetError):
        # It may have answered before it had everything, and closed: the answer tells why.
        response = connection.getresponse()
        response.will_close = True
        return response
    return connection.getresponse()


def _chunks(body: Any) -> Iterator[bytes | memoryview]:
    if isinstance(body, Upload):
        yield from body.chunks()
        return
    while chunk := body.read(1 << 20):
        yield chunk


def _set_timeout(sock: socket.socket, seconds: float) -> None:
    if isinstance(sock, ssl.SSLSocket):
        sock.settimeout(seconds)
        return
    # The kernel keeps the time: with a timeout of Python's every read is two system calls.
    sock.settimeout(None)
    timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)


def _shut_down(connection: http.client.HTTPConnection) -> None:
    # Wakes the thread that waits for it; that thread, or nobody, closes it.
    sock = connection.sock
    if sock is not None:
        with suppress(OSError):  # it was not connected any more
            # Not the method of Python's TLS sockets: it takes the TLS away, and whoever reads on
            # gets what is left in the socket, still encrypted.
            socket.socket.shutdown(sock, socket.SHUT_RDWR)
