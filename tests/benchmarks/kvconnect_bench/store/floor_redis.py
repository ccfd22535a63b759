"""The floor of a Redis server: one raw socket, with requests written by hand."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import unquote, urlsplit

from kvconnect.backends.disk.files.direct_io import view
from kvconnect.bench.store.floor import Floor, median_seconds, seconds_of
from kvconnect.bench.store.payloads import Payloads

_WINDOWS = (1, 2)
_LOCAL_SEND_NBYTES = 208 << 10  # faster than the system's default between processes of one host


class RedisFloor(Floor):
    """A blocking connection with requests that are written by hand. All methods block.

    The floor checks, indexes and looks up nothing. Otherwise it does what a store does with the
    same values: it takes names that were free, and moves from and to the same memory.

    Raises:
        OSError: the server is gone.
        RuntimeError: the server answered with an error.
    """

    name = "raw sockets"

    def __init__(self, payloads: Payloads, url: str) -> None:
        super().__init__(payloads)
        self._sources = [view(block.data) for block in payloads.blocks]
        self._targets = [view(data) for data in payloads.into]
        stem = secrets.token_hex(8).encode()
        self._names = [b"floor:%s:%06d" % (stem, number) for number in range(payloads.count)]
        parts = urlsplit(url)
        place = (parts.hostname or "localhost", parts.port or 6379)
        self._sock = socket.create_connection(place, timeout=30)
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sock.settimeout(None)
            if self._sock.getsockname()[0] == self._sock.getpeername()[0]:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_SEND_NBYTES)
                with suppress(AttributeError, OSError):
                    self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
            if parts.password is not None:
                user = unquote(parts.username or "default")
                _call(self._sock, b"AUTH", user.encode(), unquote(parts.password).encode())
            _call(self._sock, b"SELECT", b"%d" % int(parts.path.strip("/") or 0))
        except BaseException:
            self._sock.close()
            raise

    def put(self) -> list[float]:
        """Sends SET of all values, one or two under way; returns the seconds of the faster."""
        return [min(self._timed(self._set, window, anew=True) for window in _WINDOWS)]

    def get(self) -> list[float]:
        """Sends GET of all values, one or two under way; returns the seconds of the faster.

        A further request is sent when a value begins to arrive.
        """
        return [min(self._timed(self._get, window) for window in _WINDOWS)]

    def lookup(self, keys: int) -> float:
        """Returns the seconds of EXISTS of so many names, sent and answered together."""
        names = (self._names * keys)[:keys]
        asked = b"".join(b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%s\r\n" % (len(one), one) for one in names)

        def ask() -> None:
            self._sock.sendall(asked)
            _expect(self._sock, b":1\r\n" * keys)

        return median_seconds(ask)

    def close(self) -> None:
        """Deletes the values, and closes the connection."""
        try:
            self._forget()
        finally:
            self._sock.close()

    def _timed(self, run: Callable[[int], None], window: int, *, anew: bool = False) -> float:
        if anew:
            self._forget()
        return seconds_of(lambda: run(window))

    def _forget(self) -> None:
        _call(self._sock, b"UNLINK", *self._names)

    def _set(self, window: int) -> None:
        waiting = 0
        for name, source in zip(self._names, self._sources, strict=True):
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, source.nbytes)
            views = [memoryview(head), source, memoryview(b"\r\n")]
            while views:
                sent = self._sock.sendmsg(views)
                while views and sent >= len(views[0]):
                    sent -= len(views.pop(0))
                if sent:
                    views[0] = views[0][sent:]
            waiting += 1
            if waiting == window:
                _expect(self._sock, b"+OK\r\n")
                waiting -= 1
        _expect(self._sock, b"+OK\r\n" * waiting)

    def _get(self, window: int) -> None:
        requests = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(one), one) for one in self._names]
        self._sock.sendall(b"".join(requests[:window]))
        for number, target in enumerate(self._targets):
            _expect(self._sock, b"$%d\r\n" % target.nbytes)
            self._sock.sendall(b"".join(requests[number + window : number + window + 1]))
            _receive(self._sock, target)
            _expect(self._sock, b"\r\n")


def _receive(sock: socket.socket, view: memoryview) -> None:
    while len(view):
        received = sock.recv_into(view, len(view), socket.MSG_WAITALL)
        if not received:
            raise ConnectionResetError("the server closed the connection")
        view = view[received:]


def _expect(sock: socket.socket, answer: bytes) -> None:
    found = bytearray(len(answer))
    _receive(sock, memoryview(found))
    if found != answer:
        raise RuntimeError(f"the server answered {bytes(found[:80])!r}, not {answer[:80]!r}")


def _call(sock: socket.socket, *words: bytes) -> None:
    """Sends a command, and reads its answer of one line."""
    packed = b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
    sock.sendall(b"*%d\r\n%s" % (len(words), packed))
    answer = b""
    while not answer.endswith(b"\r\n"):
        answer += sock.recv(1)
    if answer.startswith(b"-"):
        raise RuntimeError(f"the server answered {answer!r}")
