"""A listening socket whose connections have a thread each, and are bounded in number."""

from __future__ import annotations

import errno
import ipaddress
import socket
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvconnect.address import is_loopback
from kvconnect.errors import ConfigurationError
from kvconnect.trace import count, warn_once

_MAX_OPENING = 32
_MAX_ADMITTED = 256
_PAUSE_S = 0.1
"""The pause after a failed accept(): descriptors or memory may be short for a moment."""

# A host that has more than one in so many places loses its own before others lose theirs.
_FAIR_SHARE = 4
# At least one in so many places is left to connections that were never used.
_NEWCOMERS = 4


class Used(Protocol):
    """The properties of a connection by which it may have to make room for a new one."""

    @property
    def host(self) -> str:
        """The peer's host, as of `host_of`."""

    @property
    def used_at(self) -> float | None:
        """The time of its last use, on `time.monotonic`; ``None`` if it was never used."""


class Admitted(Used, Hashable, Protocol):
    """A connection whose handshake has succeeded. Neither method blocks."""

    def cut(self, reason: str) -> None:
        """Ends the connection at once."""

    def close(self, reason: str) -> None:
        """Ends the connection when all that is queued was sent."""


A = TypeVar("A", bound=Admitted)
U = TypeVar("U", bound=Used)


@dataclass(eq=False, slots=True)
class _Opening:
    """A connection in its handshake."""

    socket: socket.socket
    host: str
    used_at: None = None


class Acceptor(ABC, Generic[A]):
    """Accepts connections, each served by a thread of its own.

    At most 32 connections are in the handshake. One more replaces the `oldest`, so that connections
    that never finish their handshake exclude no peer. At most 256 connections are admitted. One
    more replaces the `least_useful`, so that idle or hostile peers neither exclude nor replace
    peers that use their connection.

    Args:
        name: a part of the names of threads and counters.
        host, port: the address to listen on; port 0 is any that is free.

    Attributes:
        host, port: the address that it listens on; the port is never 0.

    Raises:
        ConfigurationError: the port is taken, or the address is not this machine's.
    """

    def __init__(self, name: str, host: str, port: int) -> None:
        self._name = name
        self._sock = _listening(host, port)
        self.host: str = host
        self.port: int = self._sock.getsockname()[1]
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._opening: dict[_Opening, None] = {}
        self._admitted: dict[Hashable, A] = {}
        self._threads: set[threading.Thread] = set()  # also of those that were replaced
        self._accepting = threading.Thread(
            target=self._accept, name=f"kvconnect-{name}-accept", daemon=True
        )
        self._accepting.start()

    @abstractmethod
    def _open(self, sock: socket.socket, host: str) -> A | None:
        """Makes the handshake; blocks for a limited time.

        Args:
            sock: the accepted socket. The acceptor closes it when the connection has ended.
            host: the peer's host, as of `host_of`.

        Returns:
            The connection; ``None`` if the peer is refused.
        """

    @abstractmethod
    def _serve(self, admitted: A) -> None:
        """Serves the connection; blocks until it has ended."""

    def _key(self, admitted: A) -> Hashable:
        """Returns the name of the peer. A connection replaces an earlier one of that name."""
        return admitted

    def close(self, timeout_s: float | None = None) -> None:
        """Accepts no more and closes all connections. Blocks until their threads have ended.

        Args:
            timeout_s: the longest wait for each thread; without limit by default.
        """
        with self._lock:
            self._closed.set()
            opening, admitted = list(self._opening), list(self._admitted.values())
            threads = [self._accepting, *self._threads]
        shut(self._sock)  # ends accept()
        for one in opening:
            shut(one.socket)
        for each in admitted:
            each.close("the peer is shutting down")
        for thread in threads:
            thread.join(timeout_s)
        self._sock.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, (address, *_) = self._sock.accept()
            except OSError as error:
                if not self._closed.is_set():
                    warn_once(
                        f"{self._name} accept", f"{self._name} connections: cannot accept: {error}"
                    )
                    self._closed.wait(_PAUSE_S)
                continue
            if not self._start(_Opening(sock, host_of(address))):
                sock.close()

    def _start(self, opening: _Opening) -> bool:
        thread = threading.Thread(
            target=self._run, args=(opening,), name=f"kvconnect-{self._name}-serve", daemon=True
        )
        with self._lock:
            if self._closed.is_set():
                return False
            if len(self._opening) >= _MAX_OPENING:
                count(f"transfer.{self._name}.pushed_out")
                replaced = oldest(list(self._opening))
                del self._opening[replaced]
                shut(replaced.socket)
            try:
                thread.start()
            except RuntimeError as error:
                warn_once(
                    f"{self._name} threads",
                    f"{self._name} connections: {error}; allow more threads",
                )
                return False
            self._opening[opening] = None
            self._threads.add(thread)
        return True

    def _run(self, opening: _Opening) -> None:
        admitted = None
        try:
            admitted = self._open(opening.socket, opening.host)
            if admitted is not None and self._admit(opening, admitted):
                self._serve(admitted)
        finally:
            with self._lock:
                self._opening.pop(opening, None)
                if admitted is not None:
                    key = self._key(admitted)
                    if self._admitted.get(key) is admitted:
                        del self._admitted[key]
                self._threads.discard(threading.current_thread())
            opening.socket.close()

    def _admit(self, opening: _Opening, admitted: A) -> bool:
        """Admits a connection after its handshake, and cuts the one that it replaces.

        Returns False if it was replaced during the handshake, or the acceptor is closed.
        """
        key = self._key(admitted)
        with self._lock:
            if self._closed.is_set() or opening not in self._opening:
                return False
            del self._opening[opening]
            earlier = self._admitted.pop(key, None)
            if earlier is not None:
                earlier.cut("the peer connected anew")
            elif len(self._admitted) >= _MAX_ADMITTED:
                count(f"transfer.{self._name}.pushed_out")
                replaced = least_useful(list(self._admitted.values()))
                del self._admitted[self._key(replaced)]
                replaced.cut(f"another peer took its place: {_MAX_ADMITTED} are connected")
            self._admitted[key] = admitted
        return True


def shut(sock: socket.socket) -> None:
    """Shuts `sock` down, which ends the calls of other threads that block on it."""
    with suppress(OSError):  # never connected, or closed by the other side
        sock.shutdown(socket.SHUT_RDWR)


def _listening(host: str, port: int) -> socket.socket:
    where = f"{host}:{port}"
    if not 0 <= port < 1 << 16:
        raise ConfigurationError(f"port: {port} must be 0 to 65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family, backlog=128)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                f"port: {where} is taken by another process; choose another, or 0 for any"
            ) from error
        raise ConfigurationError(
            f"host: cannot listen at {where}: {error.strerror or error}"
        ) from error


def host_of(address: str) -> str:
    """Returns the part that all addresses of the host with this numeric `address` share.

    All of loopback is one host, and so is an IPv6 network of 64 bits, since one machine has all of
    either.
    """
    if is_loopback(address):
        return "loopback"
    if ":" in address and "." not in address:
        return str(ipaddress.ip_network((address.partition("%")[0], 64), strict=False))
    return address


def oldest(connections: Sequence[U]) -> U:
    """Returns the oldest connection of the host that has most of them.

    If no host has more than a quarter of the connections, it is the oldest of all.

    Args:
        connections: at least one, oldest first.
    """
    host, most = Counter(one.host for one in connections).most_common(1)[0]
    if most * _FAIR_SHARE <= len(connections):
        return connections[0]
    return next(one for one in connections if one.host == host)


def least_useful(connections: Sequence[U]) -> U:
    """Returns the connection to close for a new one.

    It is the `oldest` of the connections that were never used: idle or hostile ones replace no used
    one, however many they are. If the used ones have more than three quarters of the places,
    newcomers would replace each other. Then it is the connection whose last use is longest ago.

    Args:
        connections: at least one, oldest first.
    """
    unused = [one for one in connections if one.used_at is None]
    if unused and len(unused) * _NEWCOMERS >= len(connections):
        return oldest(unused)
    return min(connections, key=lambda one: (one.used_at is None, one.used_at or 0.0))
