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
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from urllib.parse import SplitResult, urlsplit

from botocore.exceptions import (
    ConnectTimeoutError,
    EndpointConnectionError,
    HTTPClientError,
    ProxyConnectionError,
    ReadTimeoutError,
    SSLError,
)
from botocore.httpsession import ProxyConfiguration, mask_proxy_url

from kvconnect.backends.s3.errors import Aborted

# The bytes per second that determine a request's deadline, in addition to the timeout.
_SLOWEST = 256 << 10
# The bytes of a request that the socket may still hold after all were sent.
_MOST_BUFFERED = 4 << 20
_PORTS = {"http": 80, "https": 443}


class Connections:
    """The connections that are open, idle or busy. Thread-safe.

    Args:
        connect_timeout: seconds.
        read_timeout: seconds without a byte.
        tls: for ``https``; ``None``: Python's own.
        proxies: the URL of the proxy for the services of each scheme; itself without TLS.
    """

    def __init__(
        self,
        *,
        connect_timeout: float,
        read_timeout: float,
        tls: ssl.SSLContext | None,
        proxies: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._connect_timeout = connect_timeout
        self._read_timeout = read_timeout
        self._tls = tls
        self._proxies = ProxyConfiguration(dict(proxies))
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

    def forwarding(self, url: SplitResult) -> dict[str, str] | None:
        """Returns the headers for the proxy that forwards requests for `url`; ``None``: none does.

        Requests over TLS are not forwarded: a proxy connects them to the service.
        """
        if url.scheme == "https" or (proxy := self._proxies.proxy_url_for(url.geturl())) is None:
            return None
        headers: dict[str, str] = self._proxies.proxy_headers_for(proxy)
        return headers

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
        proxy: str | None = self._proxies.proxy_url_for(service)
        via = url if proxy is None else urlsplit(proxy)
        connection = http.client.HTTPConnection(
            via.hostname or "", via.port or _PORTS[via.scheme], timeout=self._connect_timeout
        )
        try:
            connection.connect()
            self._watch(connection, time.monotonic() + self._connect_timeout)
            if url.scheme == "https":
                if proxy is not None:
                    _tunnel(connection.sock, url, self._proxies.proxy_headers_for(proxy))
                tls = self._tls or ssl.create_default_context()
                connection.sock = tls.wrap_socket(connection.sock, server_hostname=url.hostname)
        except BaseException as error:
            self.drop(connection)
            if isinstance(error, (OSError, http.client.HTTPException)):
                raise self._unreachable(error, service, proxy) from error
            raise
        connection.sock.settimeout(self._read_timeout)
        self._watch(connection, math.inf)
        return connection

    def _watch(self, connection: http.client.HTTPConnection, until: float) -> None:
        """Sets the deadline of `connection`.

        Raises:
            Aborted: `abort` was called; `connection` is closed.
        """
        with self._lock:
            if not self._aborted:
                self._open[connection] = until
                self._sockets[connection] = connection.sock
                return
        self.drop(connection)
        raise Aborted

    def _unreachable(self, error: Exception, service: str, proxy: str | None) -> Exception:
        if self._aborted:
            return Aborted()
        if isinstance(error, TimeoutError):
            return ConnectTimeoutError(endpoint_url=service, error=error)
        if isinstance(error, ssl.SSLError):
            return SSLError(endpoint_url=service, error=error)
        if proxy is not None:
            return ProxyConnectionError(proxy_url=f"{mask_proxy_url(proxy)}: {error}")
        return EndpointConnectionError(endpoint_url=service, error=error)


def _tunnel(sock: socket.socket, url: SplitResult, headers: Mapping[str, str]) -> None:
    """Makes the proxy that `sock` is connected to connect it to the service of `url`.

    Raises:
        OSError, HTTPException: the proxy refuses, or does not answer.
    """
    host = url.netloc.rpartition("@")[2]
    target = host if url.port else f"{host}:{_PORTS[url.scheme]}"
    fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    sock.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{fields}\r\n".encode())
    with http.client.HTTPResponse(sock, method="CONNECT") as answer:
        answer.begin()
        if answer.status != http.client.OK:
            raise OSError(f"it answers {answer.status} {answer.reason}")


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
