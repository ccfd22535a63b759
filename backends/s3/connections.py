"""The connections to the service: kept for the next request, ended when the store is closed."""

from __future__ import annotations

import http.client
import math
import select
import socket
import ssl
import threading
import time
from collections import defaultdict
from contextlib import suppress
from urllib.parse import SplitResult

from botocore.exceptions import (
    ConnectTimeoutError,
    EndpointConnectionError,
    HTTPClientError,
    ReadTimeoutError,
    SSLError,
)

from kvconnect.backends.s3.errors import Aborted

# The bytes per second that determine a request's deadline, in addition to the timeout.
_SLOWEST = 256 << 10
# The bytes of a request that the socket may still hold after all were sent.
_MOST_BUFFERED = 4 << 20


class Connections:
    """The connections that are open, idle or busy. Thread-safe.

    Args:
        connect_timeout: seconds.
        read_timeout: seconds without a byte.
        tls: for ``https``; ``None``: Python's own.
    """

    def __init__(
        self, *, connect_timeout: float, read_timeout: float, tls: ssl.SSLContext | None
    ) -> None:
        self._connect_timeout = connect_timeout
        self._read_timeout = read_timeout
        self._tls = tls
        self._lock = threading.Lock()
        self._idle: defaultdict[str, list[http.client.HTTPConnection]] = defaultdict(list)
        # Every connection, with the deadline of its request.
        self._open: dict[http.client.HTTPConnection, float] = {}
        # The library drops its reference to a connection with its last answer, which still uses it.
        self._sockets: dict[http.client.HTTPConnection, socket.socket] = {}
        self._aborted = False

    def take(self, url: SplitResult) -> http.client.HTTPConnection:
        """Returns a connection to the service of `url`, for one request.

        Raises:
            botocore's ConnectionError: no connection can be made.
            Aborted: `abort` was called.
        """
        service = f"{url.scheme}://{url.netloc}"
        while True:
            with self._lock:
                if self._aborted:
                    raise Aborted
                idle = self._idle[service]
                connection = idle.pop() if idle else None
            if connection is None:
                return self._connect(url, service)
            # Readable before a request was sent: the server has closed it.
            if not _readable(connection.sock):
                return connection
            self.drop(connection)

    def allow(self, connection: http.client.HTTPConnection, nbytes: int) -> None:
        """Sets a generous deadline by which `connection` must have moved `nbytes`."""
        self._open[connection] = time.monotonic() + self._read_timeout + nbytes / _SLOWEST

    def sent(self, connection: http.client.HTTPConnection, nbytes: int) -> None:
        """Extends the timeout for the response: `nbytes` of the request may still be under way.

        Call `received` once the response begins.
        """
        more = min(nbytes, _MOST_BUFFERED) / _SLOWEST
        connection.sock.settimeout(self._read_timeout + more)

    def received(self, connection: http.client.HTTPConnection) -> None:
        """Sets the usual timeout again, since a response has begun."""
        if connection.sock is not None:  # not if the response is complete
            connection.sock.settimeout(self._read_timeout)

    def give_back(self, url: SplitResult, connection: http.client.HTTPConnection) -> None:
        """Keeps `connection`, which has no unread bytes, for another request."""
        with self._lock:
            if not self._aborted:
                self._idle[f"{url.scheme}://{url.netloc}"].append(connection)
                self._open[connection] = math.inf
                return
        self.drop(connection)

    def drop(self, connection: http.client.HTTPConnection) -> None:
        """Closes `connection`."""
        with self._lock:
            self._open.pop(connection, None)
            self._sockets.pop(connection, None)
        connection.close()

    def abort(self) -> None:
        """Ends every request in flight with an error, refuses new ones, closes every connection."""
        with self._lock:
            self._aborted = True
            idle = [connection for several in self._idle.values() for connection in several]
            self._idle.clear()
            busy = [self._sockets[connection] for connection in self._open.keys() - set(idle)]
        for connection in idle:
            self.drop(connection)
        for sock in busy:
            _shut_down(sock)

    def end_overdue(self) -> None:
        """Ends requests that take far longer than their size justifies, as with single bytes.

        Each byte in time keeps a socket's timeout from expiring.
        """
        now = time.monotonic()
        with self._lock:
            overdue = [self._sockets[one] for one, end in self._open.items() if now >= end]
        for sock in overdue:
            _shut_down(sock)

    def error(self, error: Exception, url: str, otherwise: type[HTTPClientError]) -> Exception:
        """Returns boto3's error for `error`, or `otherwise` for any but a timeout.

        Once the connections are aborted, returns `Aborted`.
        """
        if self._aborted:
            return Aborted()
        if isinstance(error, TimeoutError):
            return ReadTimeoutError(endpoint_url=url, error=error)
        return otherwise(endpoint_url=url, error=error)

    def _connect(self, url: SplitResult, service: str) -> http.client.HTTPConnection:
        host, port, timeout = url.hostname or "", url.port, self._connect_timeout
        connection: http.client.HTTPConnection
        if url.scheme == "https":
            connection = http.client.HTTPSConnection(host, port, timeout=timeout, context=self._tls)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=timeout)
        try:
            connection.connect()
        except OSError as error:
            connection.close()
            raise _unreachable(error)(endpoint_url=service, error=error) from error
        connection.sock.settimeout(self._read_timeout)
        with self._lock:
            if not self._aborted:
                self._open[connection] = math.inf
                self._sockets[connection] = connection.sock
                return connection
        connection.close()
        raise Aborted


def _unreachable(error: OSError) -> type[ConnectTimeoutError | SSLError | EndpointConnectionError]:
    if isinstance(error, TimeoutError):
        return ConnectTimeoutError
    return SSLError if isinstance(error, ssl.SSLError) else EndpointConnectionError


def _readable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _shut_down(sock: socket.socket) -> None:
    # Wakes the thread that waits for it; only that thread closes it.
    with suppress(OSError):  # it was not connected any more
        # Not the method of Python's TLS sockets: it removes the TLS, and the next read gets
        # the bytes left in the socket, still encrypted.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
