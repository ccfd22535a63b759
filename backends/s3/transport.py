"""HTTP under boto3: bytes go straight between sockets and the caller's buffers.

boto3's own HTTP library reads a body into new memory and copies it from there, and has no way to
end a request that another thread waits for.
"""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from typing import Any, cast
from urllib.parse import SplitResult, urlsplit

from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.exceptions import ConnectionClosedError

from kvconnect.backends.s3.body import MOST_SAID, Download, Upload
from kvconnect.backends.s3.connections import Connections

__all__ = ["Transport"]

_USUAL_PORTS = {"http": ":80", "https": ":443"}


class Transport:
    """Sends signed requests. Thread-safe; also a handler of boto3's event ``before-send``.

    Args:
        connections: which they go over.
    """

    def __init__(self, connections: Connections) -> None:
        self.connections = connections

    def __call__(self, request: AWSPreparedRequest, **_: Any) -> AWSResponse:
        """The response to `request`, its body not yet read.

        Raises:
            ConnectionError, HTTPClientError: botocore's; what is worth another attempt.
            Aborted: the connections were aborted.
        """
        url = urlsplit(request.url)
        connection = self.connections.take(url)
        self.connections.allow(connection, int(request.headers.get("Content-Length", 0)))
        try:
            response = _exchange(connection, request, url)
        except (OSError, http.client.HTTPException) as error:
            self.connections.drop(connection)
            raise self.connections.error(error, request.url, ConnectionClosedError) from error
        except BaseException:
            self.connections.drop(connection)
            raise
        promised = response.length or 0
        # A part of an object is looked at before it is read; what anything else promises is not.
        known = promised if response.status == 206 else min(promised, MOST_SAID)
        self.connections.allow(connection, known)
        body = Download(self.connections, connection, response, url=url)
        return AWSResponse(request.url, response.status, cast("Any", response.headers), body)


def _exchange(
    connection: http.client.HTTPConnection, request: AWSPreparedRequest, url: SplitResult
) -> http.client.HTTPResponse:
    target = f"{url.path or '/'}{'?' if url.query else ''}{url.query}"
    connection.putrequest(request.method, target, skip_host=True, skip_accept_encoding=True)
    if "host" not in request.headers:
        # Without the port if that is the scheme's: so it is signed.
        host = url.netloc.rpartition("@")[2].removesuffix(_USUAL_PORTS[url.scheme])
        connection.putheader("Host", host)
    for name, value in request.headers.items():
        # The body is sent at once: there is no wait for "100 Continue".
        if name.lower() != "expect":
            connection.putheader(name, value)
    connection.endheaders()
    try:
        for chunk in _chunks(request.body):
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
    elif body:
        yield bytes(body)
