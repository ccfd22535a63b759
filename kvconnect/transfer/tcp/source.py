"""The side that is read from: listens, and sends what authenticated readers ask for."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from kvconnect.errors import ConfigurationError
from kvconnect.trace import count
from kvconnect.transfer.places import host_of, least_useful, oldest
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


@dataclass(eq=False, slots=True)
class _Reader:
    """A connected reader.

    Attributes:
        host: see `host_of`.
        used_at: when it last got the bytes that it asked for; ``None`` if never.
    """

    connection: socket.socket
    host: str
    used_at: float | None = None


class Source:
    """Serves reads of `regions` on threads of its own, one per connection and one that accepts.

    At most `_MAX_STRANGERS` connections are in the handshake, each for at most `_HANDSHAKE_S`. One
    more replaces the oldest, so that connections that never finish keep no reader out. At most
    `_MAX_READERS` connections have finished it. One more replaces the `least_useful`. A reader that
    reads none of its requested bytes for `_STALL_S` is disconnected.
    """

    def __init__(self, regions: Regions, secret: SharedSecret | None) -> None:
        self._regions = regions
        self._secret = secret
        self._lock = threading.Lock()
        self._strangers: dict[_Reader, None] = {}
        self._readers: dict[_Reader, None] = {}
        self._threads: set[threading.Thread] = set()  # also of those that were pushed out
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
            left, threads = [*self._strangers, *self._readers], list(self._threads)
        for reader in left:
            _shut(reader.connection)
        for thread in threads:
            thread.join()

    def _accept(self, listener: socket.socket) -> None:
        while self._listener is listener:
            try:
                connection, (address, *_) = listener.accept()
            except OSError:
                if self._listener is listener:
                    time.sleep(0.05)  # out of file descriptors: until some are closed
                continue
            with self._lock:
                if self._listener is not listener:
                    connection.close()
                    continue
                if len(self._strangers) >= _MAX_STRANGERS:
                    self._push_out(self._strangers, oldest(list(self._strangers)))
                reader = _Reader(connection, host_of(address))
                thread = threading.Thread(
                    target=self._talk, args=(reader,), name="kvconnect-tcp-source", daemon=True
                )
                self._strangers[reader] = None
                self._threads.add(thread)
                try:
                    thread.start()
                except RuntimeError:  # no more threads: this reader tries again
                    del self._strangers[reader]
                    self._threads.discard(thread)
                    connection.close()

    def _push_out(self, among: dict[_Reader, None], reader: _Reader) -> None:
        count("transfer.tcp.turned_away")
        del among[reader]
        _shut(reader.connection)

    def _talk(self, reader: _Reader) -> None:
        connection = reader.connection
        try:
            with suppress(OSError):  # whatever the reader does ends its connection, nothing else
                prepare(connection)
                seals = answer(
                    connection, self._secret, self._incarnation, time.monotonic() + _HANDSHAKE_S
                )
                if seals is None:
                    count("transfer.tcp.strangers")
                elif self._admit(reader):
                    self._serve(reader, Stream(connection, seals))
        finally:
            with self._lock:
                self._strangers.pop(reader, None)
                self._readers.pop(reader, None)
                self._threads.discard(threading.current_thread())
            connection.close()

    def _admit(self, reader: _Reader) -> bool:
        with self._lock:
            if reader not in self._strangers:
                return False  # another took its place
            if len(self._readers) >= _MAX_READERS:
                self._push_out(self._readers, least_useful(list(self._readers)))
            del self._strangers[reader]
            self._readers[reader] = None
            return True

    def _serve(self, reader: _Reader, stream: Stream) -> None:
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
            reader.used_at = time.monotonic()
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
