"""A relay between two processes that changes what passes through it, frame by frame."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Self, TypeAlias

TO_SERVER, TO_CLIENT = "to the server", "to the client"

Change: TypeAlias = Callable[[str, int, bytes], list[bytes]]
"""Gets a direction, how many frames went that way before, and a frame; returns what goes on."""


def flip(data: bytes, bit: int) -> bytes:
    """`data` with one bit changed."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


class Tampering:
    """One change of one frame.

    Args:
        how: ``flip`` of a random bit, ``repeat``, ``drop``, or ``swap`` with the next frame.
        way: `TO_SERVER` or `TO_CLIENT`.
        number: of the frame that way, from 0.
        seed: of the bit.
        first: bits before this byte of the frame are left alone.
    """

    def __init__(self, how: str, way: str, number: int, seed: int = 0, *, first: int = 0) -> None:
        self.how, self.way, self.number, self.first = how, way, number, first
        self.done = threading.Event()
        self._rng = random.Random(seed)
        self._held: bytes | None = None

    def __call__(self, way: str, number: int, data: bytes) -> list[bytes]:
        if way != self.way:
            return [data]
        if self._held is not None:
            held, self._held = self._held, None
            self.done.set()
            return [data, held]
        if self.done.is_set() or number != self.number:
            return [data]
        if self.how == "swap":
            self._held = data
            return []
        self.done.set()
        if self.how == "flip":
            return [flip(data, self._rng.randrange(8 * self.first, 8 * len(data)))]
        return {"repeat": [data, data], "drop": []}[self.how]


class FlippedBit:
    """One bit of what passes one way from now on, so many bytes from here."""

    def __init__(self, way: str, bit: int) -> None:
        self._way, self._bit = way, bit

    def __call__(self, way: str, _: int, data: bytes) -> list[bytes]:
        bit = self._bit
        if way != self._way:
            return [data]
        self._bit -= 8 * len(data)
        return [flip(data, bit) if 0 <= bit < 8 * len(data) else data]


class Relay:
    """Listens on `host` and carries what comes to a port of 127.0.0.1, and back.

    Args:
        port: of the server.
        change: of what passes; may be replaced at any time.
        framed: it passes frames with their length before them; else whatever comes at once.
        host: to listen on; `listen`: at which port, 0: any.
    """

    def __init__(
        self,
        port: int,
        change: Change = lambda _, __, data: [data],
        *,
        framed: bool = True,
        host: str = "127.0.0.1",
        listen: int = 0,
    ) -> None:
        self.change = change
        self._to = port
        self._framed = framed
        self._listener = socket.create_server((host, listen))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Condition()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        _end(self._listener)
        self._accepting.join(60)
        self._listener.close()
        with self._lock:
            open_ones, threads = list(self._sockets), list(self._threads)
        for one in open_ones:
            _end(one)
        for thread in threads:
            thread.join(60)

    def await_only_one(self) -> None:
        """Blocks until one connection is left: bytes of earlier ones meet no change any more."""
        with self._lock:
            assert self._lock.wait_for(lambda: len(self._sockets) == 1, 60), self._sockets

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._carry, args=(client,), daemon=True)
            with self._lock:
                self._threads.append(thread)
                self._sockets.append(client)
            thread.start()

    def _carry(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            with socket.create_connection(("127.0.0.1", self._to)) as server:
                for one in (client, server):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                back = threading.Thread(target=self._pump, args=(server, client, TO_CLIENT))
                back.start()
                self._pump(client, server, TO_SERVER)
                back.join()
            with self._lock:
                self._sockets.remove(client)
                self._lock.notify_all()

    def _pump(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):
            for number, data in enumerate(self._frames(source)):
                for each in self.change(way, number, data):
                    sink.sendall(each)
        _end(source)
        _end(sink)

    def _frames(self, source: socket.socket) -> Iterator[bytes]:
        if not self._framed:
            while data := source.recv(65536):
                yield data
            return
        while len(head := source.recv(4, socket.MSG_WAITALL)) == 4:
            (length,) = struct.unpack(">I", head)
            yield head + source.recv(length, socket.MSG_WAITALL)


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
