"""The client of one server: its connections, which redis-py makes, and their threads."""

from __future__ import annotations

import asyncio
import select
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection
from redis.retry import Retry

from kvconnect.backends.lanes import Lanes
from kvconnect.backends.redis.settings import Address, RedisSettings
from kvconnect.backends.redis.wire import Wire
from kvconnect.errors import BackendUnavailable

T = TypeVar("T")

_ASKING_THREADS = 2
_JOIN_S = 1.0


Kind: TypeAlias = Literal["ask", "fetch", "store"]
"""The kind of a work. Each kind has threads of its own.

So lookups do not wait for large values, and loads, for which prompts wait, do not wait for saves.
"""


class _Hold:
    """The connection that a work uses, so that another thread can end the work by ending it."""

    __slots__ = ("_aborted", "_connection", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: AbstractConnection | None = None
        self._aborted = False

    def attach(self, connection: AbstractConnection) -> None:
        """Makes `abort` end `connection`, as soon as that has a socket.

        Raises:
            BackendUnavailable: `abort` was called before.
        """
        with self._lock:
            if self._aborted:
                raise BackendUnavailable("was abandoned")
            self._connection = connection

    def detach(self) -> None:
        """Makes `abort` end no connection any more."""
        with self._lock:
            self._connection = None

    def abort(self) -> None:
        """Ends the connection, so that the work receives no byte after this returns."""
        with self._lock:
            self._aborted = True
            sock = None if self._connection is None else _socket_of(self._connection)
            if sock is not None:
                with suppress(OSError):  # it is gone already
                    # Not SSLSocket's method: it makes the reader's socket a plain one.
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)


@dataclass(frozen=True, slots=True)
class _Link:
    connection: AbstractConnection
    wire: Wire


class RedisNode:
    """A server, and ``settings.connections`` threads each that move values to and from it.

    A connection serves one call at a time. It is reused only if the call succeeded and no byte is
    unread. All methods run on the event loop; `work` runs on a thread.
    """

    def __init__(self, address: Address, settings: RedisSettings) -> None:
        self.address = address
        self._settings = settings
        self._lanes = Lanes(
            f"kvconnect-redis-{address.port}",
            ask=_ASKING_THREADS,
            fetch=settings.connections,
            store=settings.connections,
        )
        self._idle: list[_Link] = []  # appended to and popped from on any thread
        self._closed = False
        self._fetching = 0

    @property
    def idle(self) -> bool:
        """Returns whether no work runs on its connections."""
        return not self._lanes.running

    async def run(self, work: Callable[[Wire], T], kind: Kind) -> T:
        """Returns the result of `work` on a connection.

        Returns only when no thread uses the buffers of `work`, even if it is cancelled: then the
        connection is closed during the work.

        Raises:
            BackendUnavailable: the connection was lost, timed out or cannot be made.
            redis.RedisError: connecting failed, or the server refuses the connection.
        """
        hold = _Hold()
        self._fetching += kind == "fetch"
        try:
            return await self._lanes[kind].run(lambda: self._work(hold, work), hold.abort)
        except BackendUnavailable as error:
            if self._closed:
                raise BackendUnavailable("is closed") from error
            raise
        finally:
            self._fetching -= kind == "fetch"

    def close(self) -> Awaitable[None]:
        """Ends all work, connections and threads. Threads that still connect end by themselves.

        The returned awaitable waits shortly for the threads. All else is done when the method
        returns, so that no connection stays open if the awaitable is never awaited.
        """
        self._closed = True
        self._lanes.abort()
        self._end_idle()
        return self._ended()

    async def _ended(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_JOIN_S):
                await self._lanes.close()

    def _work(self, hold: _Hold, work: Callable[[Wire], T]) -> T:
        link = self._linked(hold)
        ended_well = False
        try:
            result = work(link.wire)
            link.wire.done()
            ended_well = True
        finally:
            hold.detach()
            if ended_well:
                self._idle.append(link)
            else:
                _end(link.connection)
            if self._closed:  # checked after the append, because `close` may have run before it
                self._end_idle()
        return result

    def _linked(self, hold: _Hold) -> _Link:
        """Returns a connection without unread bytes; `hold` holds it."""
        link = self._reused()
        connection = (
            _connection_to(self.address, self._settings) if link is None else link.connection
        )
        try:
            hold.attach(connection)
            if link is None:
                connection.connect()  # type: ignore[no-untyped-call]
                hold.attach(connection)  # it may have been aborted before it had a socket
                wire = Wire(
                    _socket_of(connection),
                    self.address,
                    self._settings.timeout,
                    lambda: self._fetching <= 1 or self._settings.connections == 1,
                )
                link = _Link(connection, wire)
        except BaseException:
            hold.detach()
            _end(connection)
            raise
        return link

    def _reused(self) -> _Link | None:
        while (link := self._popped()) is not None:
            if _is_idle(_socket_of(link.connection)):
                return link
            _end(link.connection)
        return None

    def _end_idle(self) -> None:
        while (link := self._popped()) is not None:
            _end(link.connection)

    def _popped(self) -> _Link | None:
        try:
            return self._idle.pop()
        except IndexError:  # no `if`, because another thread may take it first
            return None


def connection_options(settings: RedisSettings) -> dict[str, Any]:
    """Returns the options of connections to the servers that hold the keys."""
    return {
        "db": settings.db,
        "username": settings.username,
        "password": settings.password,
        **transport_options(settings),
    }


def transport_options(settings: RedisSettings) -> dict[str, Any]:
    """Returns the options that are the same for any server, sentinels too."""
    options: dict[str, Any] = {
        "socket_timeout": settings.timeout,
        "socket_connect_timeout": settings.timeout,
        "socket_keepalive": True,
        "protocol": 2,
    }
    tls = settings.tls
    if tls is not None:
        options |= {
            "ssl_ca_certs": tls.ca,
            "ssl_certfile": tls.cert,
            "ssl_keyfile": tls.key,
            "ssl_cert_reqs": "required" if tls.verify else "none",
            "ssl_check_hostname": tls.verify,
        }
    return options


def _connection_to(address: Address, settings: RedisSettings) -> AbstractConnection:
    """Returns an unconnected connection to `address`."""
    options = {**connection_options(settings), "retry": Retry(NoBackoff(), 0)}
    if not address.port:
        del options["socket_keepalive"]  # an option of TCP
        return redis.UnixDomainSocketConnection(  # type: ignore[abstract, no-untyped-call]
            path=address.host, **options
        )
    kind = redis.Connection if settings.tls is None else redis.SSLConnection
    return kind(host=address.host, port=address.port, **options)


def _end(connection: AbstractConnection) -> None:
    """Closes `connection`, in any state."""
    connection.disconnect()  # type: ignore[no-untyped-call]


def _socket_of(connection: AbstractConnection) -> Any:
    """Returns the socket of `connection`; ``None`` if it has none."""
    return connection._sock  # noqa: SLF001  there is no public way to it


def _is_idle(sock: socket.socket | None) -> bool:
    """Returns whether `sock` has no unread bytes, and neither end has closed it."""
    if sock is None or sock.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(sock, select.POLLIN | select.POLLRDHUP)
    return not poll.poll(0)
