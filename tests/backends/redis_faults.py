"""Servers that misbehave: canned answers, and a relay that breaks what passes it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from kvconnect.errors import BackendUnavailable

T = TypeVar("T")


async def answered(call: Callable[[], Awaitable[T]]) -> T:
    """The answer of `call`, asked again while a short timeout is too short for a busy machine."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await call()
            except BackendUnavailable:
                await asyncio.sleep(0.01)


async def load(store, kit, keys, sizes):
    """How many of `keys` are loaded into buffers of `sizes`, or of one size; they are right."""
    sizes = [sizes] * len(keys) if isinstance(sizes, int) else sizes
    into = [kit.buffer(nbytes) for nbytes in sizes]
    loaded = await store.load(keys, into)
    assert all(kit.holds(b, key, framed=False) for b, key in zip(into[:loaded], keys, strict=False))
    assert all(kit.untouched(b) for b in into[loaded:])
    return loaded


class _Listener:
    """Serves each connection on a thread of its own, until `close`.

    Attributes:
        port: to connect to.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = {self._listener}
        self._threads: list[threading.Thread] = []
        self._run(self._accept)

    def cut(self) -> None:
        """End all connections there are."""
        for sock in self._open - {self._listener}:
            self._end(sock)

    def close(self) -> None:
        for sock in list(self._open):
            self._end(sock)
        for thread in self._threads:
            thread.join(60)

    def _run(self, work: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _accept(self) -> None:
        with self._listener, contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._open.add(client)
                self._run(self._serve, client)

    def _end(self, sock: socket.socket) -> None:
        self._open.discard(sock)
        with contextlib.suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)


class Relay(_Listener):
    """Passes bytes to and from a server, changed by `change`; a thread per direction.

    Attributes:
        change: gets what the server says, and how much it had said before on this connection;
            returns what is passed on, or ``None`` to cut the connection.
        step: bytes that are passed on at once.
        pause: seconds before each of these.
        reads: bytes that it takes from a client before it becomes slow at that.
    """

    def __init__(self, target: int, *, tls: ssl.SSLContext | None = None) -> None:
        self.change: Callable[[bytes, int], bytes | None] = lambda data, _: data
        self.step = 1 << 20
        self.pause = 0.0
        self.reads = 1 << 60
        self._target = target
        self._tls = tls
        super().__init__()

    def _serve(self, client: socket.socket) -> None:
        try:
            if self._tls is not None:
                self._open.discard(client)
                client = self._tls.wrap_socket(client, server_side=True)
                self._open.add(client)
            server = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            self._end(client)
            client.close()
            return
        self._open.add(server)
        up = self._run(self._pass, client, server, None)
        self._pass(server, client, self.change)
        up.join()
        # Not before: the other thread's call might reach a new socket with the same descriptor.
        client.close()
        server.close()

    def _pass(self, source, target, change) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536 if passed < self.reads else 256):
                if change is None and passed > self.reads:
                    time.sleep(0.05)
                out = data if change is None else self.change(data, passed)
                passed += len(data)
                if out is None:
                    break
                step = self.step if change else len(out)
                for start in range(0, len(out), step):
                    if change and self.pause:
                        time.sleep(self.pause)
                    target.sendall(out[start : start + step])
        self._end(source)
        self._end(target)


class Script(_Listener):
    """A server that answers each command as `answer` says; ``None``: not at all."""

    def __init__(self, answer: Callable[[list[bytes]], bytes | None]) -> None:
        self.answer = answer
        super().__init__()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError, ValueError):
            for command in _commands(client.makefile("rb")):
                answer = self.answer(command)
                if answer is not None:
                    client.sendall(answer)


def _commands(stream) -> Iterator[list[bytes]]:
    while line := stream.readline():
        words = []
        for _ in range(int(line[1:])):
            nbytes = int(stream.readline()[1:])
            words.append(stream.read(nbytes + 2)[:-2])
        yield words
