"""S3 servers on this machine: moto, which knows the protocol, and one that can be made to fail."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "cache"
SECRET = "secret"
_STOP_S = 1.0


@contextmanager
def moto_server() -> Iterator[str]:
    """Runs moto with an empty bucket `BUCKET`; its endpoint's URL."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it tells of every request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    client.create_bucket(Bucket=BUCKET)
    client.close()
    try:
        yield endpoint
    finally:
        server.stop()


@dataclass(slots=True)
class Request:
    """What a fault is told, and what a test can look at."""

    method: str
    name: str
    headers: dict[str, str]
    query: dict[str, list[str]]

    @property
    def kind(self) -> str:
        """The store's kind of object: ``k`` of a block, ``g`` payload, ``c`` children."""
        parts = self.name.split("/")
        return parts[parts.index("v1") + 1] if "v1" in parts else ""


@dataclass(slots=True)
class Answer:
    """What the server sends.

    Attributes:
        promise: Content-Length, if not the body's.
        raw: sent instead of all this, as it is; then the connection is closed.
        drip_s: seconds between two bytes of the body.
    """

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    promise: int | None = None
    drip_s: float = 0.0
    raw: bytes | None = None


def refusal(status: int, code: str) -> Answer:
    """An error as S3 tells it."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"
    return Answer(status, body.encode(), {"Content-Type": "application/xml"})


def signed_by(secret: str, method: str, target: str, headers: dict[str, str], body: bytes) -> bool:
    """Whether a request, as it arrived, is signed (AWS signature version 4, from its document)."""
    match = re.fullmatch(
        r"AWS4-HMAC-SHA256 Credential=[^/]+/(\d+)/([^/]+)/s3/aws4_request, "
        r"SignedHeaders=([^,]+), Signature=([0-9a-f]{64})",
        headers.get("authorization", ""),
    )
    if match is None:
        return False
    date, region, names, signature = match.groups()
    content = headers["x-amz-content-sha256"]
    if content not in {"UNSIGNED-PAYLOAD", hashlib.sha256(body).hexdigest()}:
        return False
    path, _, query = target.partition("?")
    canonical = "\n".join(
        [
            method,
            path,
            "&".join(
                sorted(part if "=" in part else part + "=" for part in query.split("&") if part)
            ),
            *(f"{name}:{' '.join(headers[name].split())}" for name in names.split(";")),
            "",
            names,
            content,
        ]
    )
    key = b"AWS4" + secret.encode()
    for part in (date, region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    scope = f"{date}/{region}/s3/aws4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    to_sign = f"AWS4-HMAC-SHA256\n{headers['x-amz-date']}\n{scope}\n{digest}"
    return hmac.compare_digest(hmac.digest(key, to_sign.encode(), "sha256").hex(), signature)


class S3Server:
    """A bucket in memory, with as much of the protocol as the store uses.

    Attributes:
        objects: name → (bytes, etag, when written).
        requests: every request so far.
        fault: asked first; its answer, if it gives one, is sent instead. It may also wait.
        ahead_s: how far its clock is ahead.
    """

    def __init__(self, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self.objects: dict[str, tuple[bytes, str, float]] = {}
        self.requests: list[Request] = []
        self.fault: Callable[[Request], Answer | None] = lambda _: None
        self.after: Callable[[Request, Answer], Answer | None] = lambda _, answer: answer
        self.ahead_s = 0.0
        self.stopping = threading.Event()
        self.connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._server = _Http(port, self)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def port(self) -> int:
        return self._server.server_port

    def stop(self) -> None:
        """Hang up on everybody; no socket is left open then, unless a fault still waits."""
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._server.all_ended.wait(_STOP_S)

    def counts(self) -> Counter[str]:
        """Requests so far, as ``GET k``, ``PUT g``, …; forgets them."""
        with self._lock:
            requests, self.requests = self.requests, []
        return Counter(f"{request.method} {request.kind}" for request in requests)

    def names(self, kind: str) -> list[str]:
        return sorted(name for name in self.objects if f"v1/{kind}/" in name)

    def answer(self, request: Request, body: bytes) -> Answer | None:
        with self._lock:
            self.requests.append(request)
        planted = self.fault(request)
        if planted is not None:
            return planted
        with self._lock:
            return self.after(request, self._answer(request, body))

    def stored(self, request: Request) -> Answer:
        """What it answers without a fault, not counted as a request."""
        with self._lock:
            return self._answer(request, b"")

    def _answer(self, request: Request, body: bytes) -> Answer:
        if not request.name:
            return self._list(request) if "list-type" in request.query else Answer(200)
        method = {"GET": self._get, "HEAD": self._get, "DELETE": self._delete}.get(request.method)
        return self._put(request, body) if method is None else method(request)

    def _get(self, request: Request) -> Answer:
        found = self.objects.get(request.name)
        if found is None:
            return refusal(404, "NoSuchKey")
        data, etag, at = found
        headers = {"ETag": etag, "Last-Modified": formatdate(at, usegmt=True)}
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
        if match is None:
            return Answer(200, data, headers)
        first, last = int(match[1]), min(int(match[2] or len(data)), len(data) - 1)
        if first >= len(data):
            return refusal(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        return Answer(206, data[first : last + 1], headers)

    def _put(self, request: Request, body: bytes) -> Answer:
        found = self.objects.get(request.name)
        if request.headers.get("if-none-match") == "*" and found is not None:
            return refusal(412, "PreconditionFailed")
        wanted = request.headers.get("if-match")
        if wanted is not None and found is None:
            return refusal(404, "NoSuchKey")
        if wanted is not None and found is not None and found[1] != wanted:
            return refusal(412, "PreconditionFailed")
        etag = f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'
        self.objects[request.name] = (body, etag, time.time() + self.ahead_s)
        return Answer(200, headers={"ETag": etag})

    def _delete(self, request: Request) -> Answer:
        self.objects.pop(request.name, None)
        return Answer(204)

    def _list(self, request: Request) -> Answer:
        prefix = request.query.get("prefix", [""])[0]
        after = request.query.get("continuation-token", [""])[0]
        names = [name for name in sorted(self.objects) if name.startswith(prefix) and name > after]
        page, rest = names[:1000], names[1000:]
        items = "".join(self._item(name, *self.objects[name]) for name in page)
        token = f"<NextContinuationToken>{page[-1]}</NextContinuationToken>" if rest else ""
        return Answer(
            200,
            f"<ListBucketResult><IsTruncated>{'true' if rest else 'false'}</IsTruncated>{token}"
            f"{items}</ListBucketResult>".encode(),
            {"Content-Type": "application/xml"},
        )

    @staticmethod
    def _item(name: str, data: bytes, etag: str, at: float) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
        return (
            f"<Contents><Key>{escape(name)}</Key><Size>{len(data)}</Size><ETag>{etag}</ETag>"
            f"<LastModified>{when}</LastModified></Contents>"
        )


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # with the usual 5 a store's many connections wait for half a second

    def __init__(self, port: int, server: S3Server) -> None:
        super().__init__(("127.0.0.1", port), _handler(server))
        self._connections = server.connections
        self._lock = threading.Lock()
        self.all_ended = threading.Event()
        self.all_ended.set()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._connections.add(request)
            self.all_ended.clear()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)  # closes it
        with self._lock:
            self._connections.discard(request)
            if not self._connections:
                self.all_ended.set()


def _handler(server: S3Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def serve(self) -> None:
            parts = urlsplit(self.path)
            target = self.path.removeprefix(f"{parts.scheme}://{parts.netloc}")  # of a proxy
            bucket, _, name = unquote(parts.path).lstrip("/").partition("/")
            headers = {key.lower(): value for key, value in self.headers.items()}
            body = self.rfile.read(int(headers.get("content-length", 0)))
            if not signed_by(SECRET, self.command, target, headers, body):
                self._send(refusal(403, "SignatureDoesNotMatch"))
                return
            request = Request(self.command, name, headers, parse_qs(parts.query))
            answer = server.answer(request, body) if bucket == BUCKET else None
            if bucket != BUCKET:
                answer = refusal(404, "NoSuchBucket")
            if answer is None:  # closed without a word
                self.close_connection = True
                return
            self._send(answer)

        def _send(self, answer: Answer) -> None:
            if answer.raw is not None:
                self.wfile.write(answer.raw)
                self.close_connection = True
                return
            length = len(answer.body) if answer.promise is None else answer.promise
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            if answer.status != 204:
                self.send_header("Content-Length", str(length))
            self.end_headers()
            if self.command == "HEAD":
                return
            if answer.drip_s:
                for byte in answer.body:
                    self.wfile.write(bytes([byte]))
                    if server.stopping.wait(answer.drip_s):
                        break
            else:
                self.wfile.write(answer.body)
            if length != len(answer.body):
                self.close_connection = True

        def handle(self) -> None:
            with suppress(OSError):  # the client went away
                super().handle()

        def date_time_string(self, timestamp: float | None = None) -> str:
            return formatdate(time.time() + server.ahead_s, usegmt=True)

        def log_message(self, *_: object) -> None:
            pass

        do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = serve  # noqa: N815

    return Handler
