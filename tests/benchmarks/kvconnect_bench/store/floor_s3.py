"""The floor of an S3 service: signed plain HTTP on a few connections, from and to memory.

The floor uses the same service, the same bytes, and objects as long as those of the store. Requests
are signed before the time starts, and written by hand. Only the status and the length are checked.
"""

from __future__ import annotations

import re
import secrets
import socket
import ssl
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from botocore.awsrequest import AWSPreparedRequest

from kvconnect.backends.disk.files.direct_io import view
from kvconnect.backends.s3.bucket import S3Bucket
from kvconnect.backends.s3.settings import S3Settings
from kvconnect.backends.url import StoreUrl
from kvconnect.bench.store.floor import Floor, seconds_on_threads
from kvconnect.bench.store.payloads import Payloads, StorePlan
from kvconnect.errors import BackendUnavailable
from kvconnect_bench.store.floor_memory import dict_lookup_seconds

_CONNECTIONS = (1, 2, 4)
_HEAD_NBYTES = 64 << 10
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)


@dataclass(frozen=True, slots=True, eq=False)
class _Object:
    """An object: its name, the values that it holds, and the buffers that it is read into."""

    name: str
    sources: list[memoryview]
    targets: list[memoryview]


def open_floor(url: str, payloads: Payloads) -> S3Floor | None:
    """Returns the floor of the store of `url`, or ``None`` if the service is behind a proxy.

    Raises:
        ConfigurationError, BackendUnavailable: the service cannot be used.
    """
    settings = S3Settings.from_url(StoreUrl.parse(url))
    # Requests are signed before there is a body.
    bucket = S3Bucket(replace(settings, sign_payload=False))
    try:
        bucket.check()
        if bucket.client.transport is not None:
            return S3Floor(payloads, bucket, settings)
    except BaseException:
        bucket.close()
        raise
    bucket.close()
    return None


def values_per_object(payloads: Payloads, settings: S3Settings) -> int:
    """Returns how many values the store puts into one object in this benchmark."""
    return max(1, min(settings.blocks_per_object, StorePlan().batch_nbytes // payloads.nbytes))


class S3Floor(Floor):
    """Writes and reads objects of as many values as the store puts into one.

    Uses one connection, and several at once. Keys are found in a dict, as in the store's own index.
    Blocks. Removes its objects at the end.

    Raises:
        BackendUnavailable: the service cannot be used in this way.
    """

    name = "plain HTTP"

    def __init__(self, payloads: Payloads, bucket: S3Bucket, settings: S3Settings) -> None:
        super().__init__(payloads)
        self._bucket = bucket
        self._tls = ssl.create_default_context(cafile=settings.ca_bundle)
        step = values_per_object(payloads, settings)
        stem = secrets.token_hex(8)
        self._objects = [
            _Object(
                settings.name("bench", stem, str(start)),
                [view(block.data) for block in payloads.blocks[start : start + step]],
                [view(data) for data in payloads.into[start : start + step]],
            )
            for start in range(0, payloads.count, step)
        ]
        self._connections = [self._connect() for _ in range(max(_CONNECTIONS))]

    def put(self) -> list[float]:
        """Writes all values; returns the seconds with each number of connections."""
        return [self._run("PUT", number) for number in _CONNECTIONS]

    def get(self) -> list[float]:
        """Reads all values back; returns the seconds with each number of connections."""
        return [self._run("GET", number) for number in _CONNECTIONS]

    def get_on(self, number: int) -> float:
        """Returns the seconds to read all values on so many connections, at most four."""
        return self._run("GET", min(number, len(self._connections)))

    def lookup(self, keys: int) -> float:
        """Returns the seconds to find the keys in a dict."""
        return dict_lookup_seconds(self.payloads, keys)

    def close(self) -> None:
        """Deletes the objects, and closes the connections."""
        for connection in self._connections:
            connection.close()
        for one in self._objects:
            self._bucket.remove(one.name)
        self._bucket.close()

    def _run(self, method: str, number: int) -> float:
        requests = [self._bucket.client.signed(method, one.name) for one in self._objects]

        def work(at: int) -> None:
            connection = self._connections[at]
            for one, request in list(zip(self._objects, requests, strict=True))[at::number]:
                if method == "PUT":
                    _put(connection, request, one.sources)
                else:
                    _get(connection, request, one.targets)

        return seconds_on_threads(number, work, range(number))

    def _connect(self) -> socket.socket:
        url = urlsplit(self._bucket.client.signed("GET", "").url)
        secure = url.scheme == "https"
        place = (url.hostname or "", url.port or (443 if secure else 80))
        connection = socket.create_connection(place, timeout=30)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        if not secure:
            return connection
        return self._tls.wrap_socket(connection, server_hostname=url.hostname)


def _put(connection: socket.socket, request: AWSPreparedRequest, views: list[memoryview]) -> None:
    connection.sendall(_head(request, sum(one.nbytes for one in views)))
    for one in views:
        connection.sendall(one)
    length, body = _answer(connection, request)
    while len(body) < length:
        body += connection.recv(length - len(body))


def _get(connection: socket.socket, request: AWSPreparedRequest, views: list[memoryview]) -> None:
    connection.sendall(_head(request, None))
    length, begun = _answer(connection, request)
    if length != sum(one.nbytes for one in views):
        raise BackendUnavailable(f"{request.url}: the service answered with {length} bytes")
    flags = 0 if isinstance(connection, ssl.SSLSocket) else socket.MSG_WAITALL
    for one in views:
        at = min(len(begun), one.nbytes)
        one[:at] = begun[:at]
        begun = begun[at:]
        while at < one.nbytes:
            size = connection.recv_into(one[at:], 0, flags)
            if not size:
                raise BackendUnavailable(f"{request.url}: the body breaks off")
            at += size


def _head(request: AWSPreparedRequest, nbytes: int | None) -> bytes:
    url = urlsplit(request.url)
    headers = {"Host": url.netloc, **dict(request.headers.items())}
    if nbytes is not None:
        headers["Content-Length"] = str(nbytes)
    lines = [f"{request.method} {url.path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "\r\n"]).encode()


def _answer(connection: socket.socket, request: AWSPreparedRequest) -> tuple[int, bytes]:
    """Returns the length of the body, and the part of it that came with the header."""
    head = b""
    while b"\r\n\r\n" not in head:
        data = connection.recv(_HEAD_NBYTES)
        if not data:
            raise BackendUnavailable(f"{request.url}: the service hung up")
        head += data
    head, _, begun = head.partition(b"\r\n\r\n")
    if not head.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 206 ")):
        raise BackendUnavailable(f"{request.url}: {head.splitlines()[0].decode('latin-1')}")
    match = _LENGTH.search(head + b"\r\n")
    if match is None:
        raise BackendUnavailable(f"{request.url}: the service tells no length")
    return int(match[1]), begun
