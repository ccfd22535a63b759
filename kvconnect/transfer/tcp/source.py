"""The side that is read from: listens, and sends what authenticated readers ask for."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

from kvconnect.errors import ConfigurationError
from kvconnect.trace import count
from kvconnect.transfer.reads import Runs
from kvconnect.transfer.regions import Regions
from kvconnect.transfer.secret import SharedSecret
from kvconnect.transfer.tcp.handshake import answer
from kvconnect.transfer.tcp.stream import Stream, block_until, prepare
from kvconnect.transfer.tcp.wire import OUTSIDE, SERVED, Malformed, receive_request, send_answer

__all__ = ["Source"]

_HANDSHAKE_S = 5.0
_STALL_S = 10.0
_MAX_STRANGERS = 32
_MAX_READERS = 256


class Source:
    """Serves reads of `regions` on threads of its own, one per connection and one that accepts.

    Bounded in number: `_MAX_STRANGERS` connections in the handshake, which may take `_HANDSHAKE_S`:
    one more takes the place of the oldest, so that those who never finish it keep no reader out;
    and `_MAX_READERS` after it: one more is closed at once. A reader that takes nothing for
    `_STALL_S` of what it asked for is disconnected.
    """

    def __init__(self, regions: Regions, secret: SharedSecret | None) -> None:
        self._regions = regions
        self._secret = secret
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, threading.Thread] = {}
        self._readers: dict[socket.socket, threading.Thread] = {}
        self._listener: socket.socket | None = None
        self._accepting: threading.Thread | None = None
        self._incarnation = b""

    def open(self, host: str, port: int, incarnation: bytes) -> int:
        """Listens; returns the port.

        Raises:
            ConfigurationError: the address cannot be listened on, for example because the port is
                taken.
        """
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((host, port), family=family, backlog=64)
        except OSError as error:
            raise ConfigurationError(
                f"host={host!r}, port={port}: cannot listen there: {error.strerror or error}"
            ) from error
        self._listener = listener
        self._incarnation = incarnation
        self._accepting = threading.Thread(
            target=self._accept, args=(listener,), name="kvconnect-tcp-accept", daemon=True
        )
        self._accepting.start()
        return int(listener.getsockname()[1])

    def close(self) -> None:
        """Stops listening and serving; blocks until no thread reads registered memory."""
        listener, self._listener = self._listener, None
        if listener is not None:
            _shut(listener)
            if self._accepting is not None:
                self._accepting.join()
            listener.close()
        with self._lock:
            left = {**self._strangers, **self._readers}
        for connection in left:
            _shut(connection)
        for thread in left.values():
            thread.join()

    def _accept(self, listener: socket.socket) -> None:
        while self._listener is listener:
            try:
                connection, _ = listener.accept()
            except OSError:
                if self._listener is listener:
                    time.sleep(0.05)  # out of file descriptors: until some are closed
                continue
            with self._lock:
                if self._listener is not listener:
                    connection.close()
                    continue
                if len(self._strangers) >= _MAX_STRANGERS:
                    count("transfer.tcp.turned_away")
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    _shut(oldest)
                thread = threading.Thread(
                    target=self._talk, args=(connection,), name="kvconnect-tcp-source", daemon=True
                )
                self._strangers[connection] = thread
                try:
                    thread.start()
                except RuntimeError:  # no more threads: this reader tries again
                    del self._strangers[connection]
                    connection.close()

    def _talk(self, connection: socket.socket) -> None:
        try:
            with suppress(OSError):  # whatever the reader does ends its connection, nothing else
                prepare(connection)
                seals = answer(
                    connection, self._secret, self._incarnation, time.monotonic() + _HANDSHAKE_S
                )
                if seals is None:
                    count("transfer.tcp.strangers")
                elif self._admit(connection):
                    self._serve(Stream(connection, seals))
        finally:
            with self._lock:
                self._strangers.pop(connection, None)
                self._readers.pop(connection, None)
            connection.close()

    def _admit(self, connection: socket.socket) -> bool:
        with self._lock:
            if connection not in self._strangers:
                return False  # another took its place
            if len(self._readers) >= _MAX_READERS:
                count("transfer.tcp.turned_away")
                return False
            self._readers[connection] = self._strangers.pop(connection)
            return True

    def _serve(self, stream: Stream) -> None:
        connection, seals = stream.connection, stream.seals
        block_until(connection, socket.SO_SNDTIMEO, _STALL_S)
        while True:
            try:
                asked = receive_request(connection, seals.requests)
            except Malformed:
                count("transfer.tcp.malformed")
                raise
            if not self._inside(asked.region, asked.runs):
                count("transfer.tcp.refused")
                send_answer(connection, seals.answers, OUTSIDE, 0)
                continue
            send_answer(connection, seals.answers, SERVED, asked.nbytes)
            stream.send(self._regions[asked.region], asked.runs, asked.seed)

    def _inside(self, region: int, runs: Runs) -> bool:
        if region >= len(self._regions):
            return False
        size = self._regions[region].nbytes
        offsets, nbytes = runs["offset"], runs["nbytes"]
        if int(offsets.min()) < 0 or int(nbytes.max()) > size:
            return False
        return bool((offsets <= size - nbytes).all())


def _shut(connection: socket.socket) -> None:
    """Ends what other threads wait for on `connection`."""
    with suppress(OSError):  # never connected, or closed by the other side
        connection.shutdown(socket.SHUT_RDWR)
