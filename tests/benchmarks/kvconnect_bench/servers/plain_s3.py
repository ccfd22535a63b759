"""A plain HTTP server that keeps objects in memory: what an S3 store can be measured against.

It knows as much of the protocol as the store uses, checks no signature, and sends objects straight
from memory, so that it costs little beside the client: one copy. ``sendfile`` from memory files or
from the page cache costs both sides more over loopback: it hands over pages of 4 KiB one by one,
where a copy goes into pieces of 32 KiB.

Run as a script, it prints its port and serves until its standard input ends.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_RANGE = re.compile(rb"\r\nrange: bytes=(\d+)-(\d*)", re.IGNORECASE)
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)
_DATE = b"Date: Thu, 01 Jan 2026 00:00:00 GMT\r\n"
_ABOUT = b'ETag: "e"\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n'


@contextmanager
def plain_server() -> Iterator[str]:
    """Runs a server with every bucket in a process of its own; yields its endpoint's URL."""
    command = [sys.executable, "-P", __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


@contextmanager
def any_credentials() -> Iterator[None]:
    """Gives boto3 credentials in the block: boto3 requires some, and the server takes any."""
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    missing = [name for name in names if name not in os.environ]
    os.environ.update(dict.fromkeys(missing, "bench"))
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]


class _Server:
    def __init__(self) -> None:
        self._objects: dict[bytes, bytearray] = {}

    def serve(self, client: socket.socket) -> None:
        """Answers requests on one connection until it ends."""
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pending = b""
        with client, suppress(ConnectionError):
            while True:
                while b"\r\n\r\n" not in pending:
                    data = client.recv(65536)
                    if not data:
                        return
                    pending += data
                head, _, pending = pending.partition(b"\r\n\r\n")
                pending = self._answer(client, head, pending)

    def _answer(self, client: socket.socket, head: bytes, pending: bytes) -> bytes:
        method, target = head.split(b" ", 2)[:2]
        name = target.partition(b"?")[0]
        if method == b"PUT":
            return self._put(client, name, head, pending)
        if method == b"DELETE":
            self._objects.pop(name, None)
            client.sendall(b"HTTP/1.1 204 No Content\r\n" + _DATE + b"\r\n")
        elif method == b"HEAD":
            client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n" + _DATE + b"\r\n")
        else:
            self._get(client, name, head)
        return pending

    def _put(self, client: socket.socket, name: bytes, head: bytes, pending: bytes) -> bytes:
        match = _LENGTH.search(head)
        length = int(match[1]) if match else 0
        if b"\r\nexpect:" in head.lower():
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        data = bytearray(length)
        given = min(length, len(pending))
        data[:given] = pending[:given]
        with memoryview(data) as view:
            at = given
            while at < length:
                size = client.recv_into(view[at:])
                if not size:
                    raise ConnectionError("cut off")
                at += size
        self._objects[name] = data
        client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n" + _DATE + _ABOUT + b"\r\n")
        return pending[given:]

    def _get(self, client: socket.socket, name: bytes, head: bytes) -> None:
        data = self._objects.get(name)
        if data is None:
            body = b"<Error><Code>NoSuchKey</Code><Message>none</Message></Error>"
            answer = b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n" % len(body)
            client.sendall(answer + _DATE + b"\r\n" + body)
            return
        match = _RANGE.search(head)
        first, last, total = 0, len(data) - 1, len(data)
        answer = b"HTTP/1.1 200 OK\r\n"
        if match is not None:
            first, last = int(match[1]), min(int(match[2] or last), last)
            answer = b"HTTP/1.1 206 Partial Content\r\n"
            answer += b"Content-Range: bytes %d-%d/%d\r\n" % (first, last, total)
        answer += b"Content-Length: %d\r\n" % (last + 1 - first)
        with memoryview(data) as view:
            client.sendall(answer + _DATE + _ABOUT + b"\r\n")
            client.sendall(view[first : last + 1])


def main() -> None:
    """Prints the port, and serves until standard input ends."""
    server = _Server()
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    print(listener.getsockname()[1], flush=True)
    threading.Thread(target=_accept, args=(listener, server), daemon=True).start()
    sys.stdin.read()


def _accept(listener: socket.socket, server: _Server) -> None:
    while True:
        client, _ = listener.accept()
        threading.Thread(target=server.serve, args=(client,), daemon=True).start()


if __name__ == "__main__":
    main()
