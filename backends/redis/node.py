"""One server: its connections, which redis-py makes, and the threads that work on them."""

from __future__ import annotations

import asyncio
import enum
import select
import socket
import threading
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection
from redis.retry import Retry

from kvconnect.backends.lanes import running_threads
from kvconnect.backends.redis.client import connection_options
from kvconnect.backends.redis.settings import Address, RedisSettings
from kvconnect.backends.redis.wire import Wire
from kvconnect.errors import BackendUnavailable

__all__ = ["Lane", "RedisNode"]

T = TypeVar("T")

_ASKING_THREADS = 2
_JOIN_S = 1.0


class Lane(enum.Enum):
    """What work is about. Each lane has threads of its own.

    So a lookup does not wait behind megabytes, nor a load, which a prompt waits for, behind saves.
    """

    ASK = enum.auto()
    FETCH = enum.auto()
    STORE = enum.auto()


class _Job:
    """Work on a connection that can be ended from another thread, by ending the connection.

    Attributes:
        outcome: the result, for who waits for it on the event loop.
    """

    __slots__ = ("_aborted", "_connection", "_lock", "_loop", "outcome")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[Any] = self._loop.create_future()
        self._lock = threading.Lock()
        self._connection: AbstractConnection | None = None
        self._aborted = False

    def attach(self, connection: AbstractConnection) -> None:
        """From now on `abort` ends `connection`, from when it has a socket.

        Raises:
            BackendUnavailable: it was called before.
        """
        with self._lock:
            if self._aborted:
                raise BackendUnavailable("was given up")
            self._connection = connection

    def detach(self) -> None:
        """`abort` ends nothing any more."""
        with self._lock:
            self._connection = None

    def tell(self, result: Any, error: BaseException | None) -> None:
        """`outcome` is this, unless it is known already; from any thread."""
        self._loop.call_soon_threadsafe(self._settle, result, error)

    def _settle(self, result: Any, error: BaseException | None) -> None:
        if self.outcome.done():
            return
        if error is None:
            self.outcome.set_result(result)
        else:
            self.outcome.set_exception(error)

    def abort(self) -> None:
        """Nothing is received for it any more once this returns, and its thread ends."""
        with self._lock:
            self._aborted = True
            sock = None if self._connection is None else _socket_of(self._connection)
            if sock is not None:
                with suppress(OSError):  # it is gone already
                    # Not SSLSocket's: that one makes it a plain socket under the reader's hands.
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)


@dataclass(frozen=True, slots=True)
class _Link:
    connection: AbstractConnection
    wire: Wire


class RedisNode:
    """A server, and ``settings.connections`` threads each that move values to and from it.

    A connection is used by one job at a time, and goes back only if the job ended well, with
    nothing unread. All methods run on the event loop; `work` runs on a thread.
    """

    def __init__(self, address: Address, settings: RedisSettings) -> None:
        self.address = address
        self._settings = settings
        name = f"kvconnect-redis-{address.port}"
        self._lanes: dict[Lane, ThreadPoolExecutor] = {}
        try:
            for lane in Lane:
                threads = _ASKING_THREADS if lane is Lane.ASK else settings.connections
                self._lanes[lane] = running_threads(threads, name)
        except BackendUnavailable:
            self._end_threads()
            raise
        self._jobs: dict[Future[None], _Job] = {}
        self._idle: list[_Link] = []  # appended to and popped from on any thread
        self._closed = False
        self._fetching = 0

    @property
    def idle(self) -> bool:
        """Whether nothing runs on its connections."""
        return not self._jobs

    async def run(self, work: Callable[[Wire], T], *, lane: Lane) -> T:
        """The result of `work` on a connection.

        Ends only when nothing can touch what `work` uses, also when it is cancelled: then the
        connection is ended under it.

        Raises:
            BackendUnavailable: the connection was lost, timed out or cannot be made.
            redis.RedisError: the same, while connecting, or the server refuses the connection.
        """
        if self._closed:
            raise BackendUnavailable("is closed")
        job = _Job()
        future = self._lanes[lane].submit(self._run, job, work)
        self._jobs[future] = job
        self._fetching += lane is Lane.FETCH
        try:
            result: T = await job.outcome
        except asyncio.CancelledError:
            await _end_of(future, job)
            raise
        finally:
            del self._jobs[future]
            self._fetching -= lane is Lane.FETCH
        return result

    def close(self) -> Awaitable[None]:
        """End all work, connections and threads. Threads that still connect end by themselves.

        Only threads are waited for: all else is done when this returns what is to be awaited, so
        that nothing stays open if nobody waits so long.
        """
        self._closed = True
        running = dict(self._jobs)
        self._end_threads()
        for future, job in running.items():
            if future.cancelled():
                job.tell(None, BackendUnavailable("is closed"))
            else:
                job.abort()
        self._end_idle()
        return _ended(running)

    def _run(self, job: _Job, work: Callable[[Wire], object]) -> None:
        # Not through the thread pool's own future: that wakes the event loop three times.
        try:
            result = self._work(job, work)
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            job.tell(None, error)
        else:
            job.tell(result, None)

    def _work(self, job: _Job, work: Callable[[Wire], T]) -> T:
        link = self._linked(job)
        ended_well = False
        try:
            result = work(link.wire)
            link.wire.done()
            ended_well = True
        finally:
            job.detach()
            if ended_well:
                self._idle.append(link)
            else:
                _end(link.connection)
            if self._closed:  # asked after the append: `close` may have looked before it
                self._end_idle()
        return result

    def _linked(self, job: _Job) -> _Link:
        """A connection on which nothing is unread, the job's."""
        link = self._reused()
        connection = self._made() if link is None else link.connection
        try:
            job.attach(connection)
            if link is None:
                connection.connect()  # type: ignore[no-untyped-call]
                job.attach(connection)  # it may have been aborted when there was no socket to end
                wire = Wire(_socket_of(connection), self._settings.timeout, self._fetches_alone)
                link = _Link(connection, wire)
        except BaseException:
            job.detach()
            _end(connection)
            raise
        return link

    def _fetches_alone(self) -> bool:
        return self._fetching <= 1 or self._settings.connections == 1

    def _reused(self) -> _Link | None:
        while (link := self._popped()) is not None:
            if _is_quiet(_socket_of(link.connection)):
                return link
            _end(link.connection)
        return None

    def _end_threads(self) -> None:
        for pool in self._lanes.values():
            pool.shutdown(wait=False, cancel_futures=True)

    def _end_idle(self) -> None:
        while (link := self._popped()) is not None:
            _end(link.connection)

    def _popped(self) -> _Link | None:
        try:
            return self._idle.pop()
        except IndexError:  # no `if`: another thread may be faster
            return None

    def _made(self) -> AbstractConnection:
        options = {**connection_options(self._settings), "retry": Retry(NoBackoff(), 0)}
        if not self.address.port:
            del options["socket_keepalive"]  # of TCP
            return redis.UnixDomainSocketConnection(  # type: ignore[abstract, no-untyped-call]
                path=self.address.host, **options
            )
        kind = redis.Connection if self._settings.tls is None else redis.SSLConnection
        return kind(host=self.address.host, port=self.address.port, **options)


def _end(connection: AbstractConnection) -> None:
    connection.disconnect()  # type: ignore[no-untyped-call]


def _socket_of(connection: AbstractConnection) -> Any:
    return connection._sock  # noqa: SLF001  there is no public way to it


def _is_quiet(sock: socket.socket | None) -> bool:
    """Whether nothing is unread on `sock`, and neither end has closed it."""
    if sock is None or sock.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(sock, select.POLLIN | select.POLLRDHUP)
    return not poll.poll(0)


async def _ended(futures: Collection[Future[None]]) -> None:
    """Wait for `futures`, not for long."""
    if futures:
        await asyncio.wait(map(asyncio.wrap_future, futures), timeout=_JOIN_S)


async def _end_of(future: Future[None], job: _Job) -> None:
    """End `job`, whose outcome nobody waits for any more; returns when it has ended for sure."""
    if not future.cancel():
        job.abort()
    waiting = asyncio.wrap_future(future)
    while not waiting.done():
        try:
            await asyncio.wait({waiting})
        except asyncio.CancelledError:
            continue  # it is being cancelled already
    if not job.outcome.cancelled():
        job.outcome.exception()  # looked at: asyncio would complain
