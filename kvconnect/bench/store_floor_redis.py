"""What a Redis server and one connection can do: raw sockets, one value after the other."""

from __future__ import annotations

import secrets
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

__all__ = ["RedisFloor", "redis_floor"]


@dataclass(frozen=True, slots=True)
class RedisFloor:
    """Median seconds to move all values of a run, once.

    Attributes:
        nbytes: of all of them.
    """

    nbytes: int
    set_seconds: float
    get_seconds: float


def redis_floor(
    host: str,
    port: int,
    *,
    value_nbytes: int = 2 << 20,
    count: int = 32,
    repeats: int = 7,
    password: str | None = None,
    username: str = "default",
    db: int = 0,
) -> RedisFloor:
    """Store and read `count` values over one blocking TCP socket, `repeats` times.

    As fast as it goes: nothing is checked or looked up, requests are written by hand, values go
    from and to memory that was touched before, and the next request is sent before the last value
    has arrived. Blocks. Leaves nothing behind.

    Raises:
        OSError: the server is gone.
        RuntimeError: it answered with an error.
    """
    stem = secrets.token_hex(8).encode()
    names = [b"floor:%s:%06d" % (stem, number) for number in range(count)]
    generator = np.random.default_rng(0)
    sources = [generator.integers(0, 256, value_nbytes, np.uint8) for _ in names]
    target = [np.ones(value_nbytes, np.uint8) for _ in names]
    with socket.create_connection((host, port), timeout=30) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(None)
        if password is not None:
            _call(sock, b"AUTH", username.encode(), password.encode())
        _call(sock, b"SELECT", b"%d" % db)
        try:
            return RedisFloor(
                count * value_nbytes,
                _best(lambda window: _set(sock, names, sources, window), repeats),
                _best(lambda window: _get(sock, names, target, window), repeats),
            )
        finally:
            for name in names:
                _call(sock, b"UNLINK", name)


def _best(run: Callable[[int], None], repeats: int) -> float:
    """Median seconds with whichever number of values under way is faster here."""
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for window in seconds:
        run(window)
    for _ in range(repeats):
        for window, times in seconds.items():
            start = time.perf_counter()
            run(window)
            times.append(time.perf_counter() - start)
    return min(statistics.median(times) for times in seconds.values())


def _set(sock: socket.socket, names: list[bytes], sources: list[np.ndarray], window: int) -> None:
    waiting = 0
    for name, source in zip(names, sources, strict=True):
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, source.nbytes)
        views = [memoryview(head), source.data, memoryview(b"\r\n")]
        while views:
            sent = sock.sendmsg(views)
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]
        waiting += 1
        if waiting == window:
            _expect(sock, b"+OK\r\n")
            waiting -= 1
    for _ in range(waiting):
        _expect(sock, b"+OK\r\n")


def _get(sock: socket.socket, names: list[bytes], targets: list[np.ndarray], window: int) -> None:
    requests = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name) for name in names]
    sock.sendall(b"".join(requests[:window]))
    for number, target in enumerate(targets):
        _expect(sock, b"$%d\r\n" % target.nbytes)
        sock.sendall(b"".join(requests[number + window : number + window + 1]))
        view = target.data
        while len(view):
            received = sock.recv_into(view, len(view), socket.MSG_WAITALL)
            if not received:
                raise ConnectionResetError("the server closed the connection")
            view = view[received:]
        _expect(sock, b"\r\n")


def _expect(sock: socket.socket, answer: bytes) -> None:
    found = sock.recv(len(answer), socket.MSG_WAITALL)
    if found != answer:
        raise RuntimeError(f"the server answered {found!r}, not {answer!r}")


def _call(sock: socket.socket, *words: bytes) -> None:
    """A command whose answer is one line."""
    packed = b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
    sock.sendall(b"*%d\r\n%s" % (len(words), packed))
    answer = b""
    while not answer.endswith(b"\r\n"):
        answer += sock.recv(1)
    if answer.startswith(b"-"):
        raise RuntimeError(f"the server answered {answer!r}")
