"""A TCP proxy that misbehaves on demand: between a client under test and its real server.

::

    with TcpProxy("127.0.0.1", server_port) as proxy:
        client = connect("127.0.0.1", proxy.port)
        proxy.set(TcpFault(frozen=True))      # nothing moves; connections stay open
        proxy.set(TcpFault(reset_after=65536))
        proxy.heal()

It runs on a thread of its own, so that a client may use it from any event loop or thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

from kvconnect.testing.faults.tcp_fault import TcpFault

_CHUNK = 65536
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 seconds: close() sends RST

T = TypeVar("T")


class TcpProxy:
    """Listens on a port of 127.0.0.1 and forwards to ``host:port``, with the fault that is set.

    Its methods may be called from any thread; each returns once its effect is complete (after
    milliseconds). `close` releases everything, whatever fault is set.

    Attributes:
        host, port: the proxy's address, which never changes.
        fault: the present fault; set it with `set`.
        accepted: the number of connections so far.
    """

    host = "127.0.0.1"

    def __init__(self, host: str, port: int) -> None:
        self.fault = TcpFault()
        self.accepted = 0
        self._server = (host, port)
        self._changed = asyncio.Event()
        self._connections: set[_Connection] = set()
        self._fillers: list[socket.socket] = []
        self._listener = _listen((self.host, 0))
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kvconnect-tcp-proxy", daemon=True)
        self._thread.start()
        self._loop.call_soon_threadsafe(self._start_accepting)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def open_connections(self) -> int:
        """The number of open connections."""
        return len(self._connections)

    def set(self, fault: TcpFault) -> None:
        """Sets `fault` instead of the present one.

        Raises:
            OSError: another process took the port while connections were refused. A later call
                tries to listen again.
        """
        self._call(self._set(fault))

    def heal(self) -> None:
        """Ends the fault. Half-open connections are reset, others continue."""
        self.set(TcpFault())

    def redirect(self, host: str, port: int) -> None:
        """Sends new connections to another server."""
        self._server = (host, port)

    def reset_all(self) -> None:
        """Resets every open connection."""
        self._call(self._reset_all())

    def close(self) -> None:
        """Resets all connections, stops listening, ends the thread. Idempotent."""
        if self._thread.is_alive():
            self._call(self._stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _stop(self) -> None:
        self._stop_accepting()
        self._listener.close()
        self._drop_fillers()
        await self._reset_all()

    async def _set(self, fault: TcpFault) -> None:
        before, self.fault = self.fault, fault
        self._stop_accepting()
        self._drop_fillers()
        self._listener.close()
        if fault.refused or before.half_open:
            await self._reset_all()
        if not fault.refused:
            self._listener = _listen((self.host, self.port), backlog=0 if fault.black_hole else 128)
            if fault.black_hole:
                self._fill_backlog()
            else:
                self._start_accepting()
        for connection in self._connections:
            connection.start_counting()
        self._changed.set()  # ends every pause
        self._changed = asyncio.Event()

    def _start_accepting(self) -> None:
        # Not a task, because cancelling it while a client connects would lose the client's socket.
        self._loop.add_reader(self._listener, self._accept)

    def _stop_accepting(self) -> None:
        if self._listener.fileno() >= 0:  # closed, because connections are refused
            self._loop.remove_reader(self._listener)

    def _fill_backlog(self) -> None:
        # The kernel drops the SYN of a client once the queue of those not yet accepted is full.
        for _ in range(4):
            filler = socket.socket()
            filler.settimeout(0)
            filler.connect_ex((self.host, self.port))
            self._fillers.append(filler)

    def _drop_fillers(self) -> None:
        for filler in self._fillers:
            filler.close()
        self._fillers.clear()

    async def _reset_all(self) -> None:
        await asyncio.gather(*(connection.reset() for connection in list(self._connections)))

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:  # the client closed before it was accepted
            return
        client.settimeout(0)
        self.accepted += 1
        connection = _Connection(self, client)
        self._connections.add(connection)
        connection.start(self._connections.discard)

    async def pause(self, seconds: float | None) -> None:
        """Sleeps until `seconds` are over or the fault changes. On the proxy's loop."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    async def dial(self) -> socket.socket:
        """Returns a connection to the server. On the proxy's loop."""
        upstream = socket.socket()
        upstream.settimeout(0)
        try:
            await self._loop.sock_connect(upstream, self._server)
        except BaseException:
            upstream.close()
            raise
        return upstream


def _listen(address: tuple[str, int], *, backlog: int = 128) -> socket.socket:
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.settimeout(0)
        listener.bind(address)
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


class _Connection:
    """A client and its own connection to the server. All methods run on the proxy's loop.

    Args:
        proxy: dials the server, and has the fault.
        client: a connected client, closed when either side closes.
    """

    def __init__(self, proxy: TcpProxy, client: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._upstream: socket.socket | None = None
        self._answered = 0
        self._task: asyncio.Task[None] | None = None

    def start(self, on_end: Callable[[Self], None]) -> None:
        """Starts to forward bytes both ways; calls `on_end` once both sides are closed."""
        self._task = asyncio.create_task(self._serve())
        self._task.add_done_callback(lambda _: on_end(self))

    def start_counting(self) -> None:
        """Restarts the count of answered bytes for faults."""
        self._answered = 0

    async def reset(self) -> None:
        """Resets the connection on both sides."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _serve(self) -> None:
        try:
            while self._proxy.fault.stopped:
                await self._proxy.pause(None)
            self._upstream = await self._proxy.dial()
            for end in (self._client, self._upstream):  # here, where an error closes both
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            requests = asyncio.create_task(self._pump(self._client, self._upstream, answers=False))
            answers = asyncio.create_task(self._pump(self._upstream, self._client, answers=True))
            try:
                await asyncio.gather(requests, answers)
            finally:
                requests.cancel()
                answers.cancel()
                await asyncio.wait([requests, answers])
        except OSError:
            pass  # one side closed, so the other is reset
        finally:
            for side in (self._client, self._upstream):
                if side is not None:
                    with contextlib.suppress(OSError):
                        side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    side.close()

    async def _pump(self, source: socket.socket, sink: socket.socket, *, answers: bool) -> None:
        # Bytes are received at once and delivered after the delay, so that a delay does not lower
        # the speed.
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=256)
        delivering = asyncio.create_task(self._deliver(queue, sink, answers=answers))
        loop = asyncio.get_running_loop()
        try:
            while True:
                data = await loop.sock_recv(source, _CHUNK)
                delay = self._proxy.fault.delay_s if answers else 0.0
                put = asyncio.create_task(queue.put((loop.time() + delay, data)))
                await asyncio.wait([put, delivering], return_when=asyncio.FIRST_COMPLETED)
                if delivering.done():
                    put.cancel()
                if delivering.done() or not data:
                    await delivering
                    return
        finally:
            delivering.cancel()
            await asyncio.wait([delivering])

    async def _deliver(
        self, queue: asyncio.Queue[tuple[float, bytes]], sink: socket.socket, *, answers: bool
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, data = await queue.get()
            while self._proxy.fault.stopped:
                await self._proxy.pause(None)
            while due > loop.time() and self._proxy.fault.delay_s:
                await self._proxy.pause(due - loop.time())
            if not data:
                with contextlib.suppress(OSError):  # the other side may have closed meanwhile
                    sink.shutdown(socket.SHUT_WR)
                return
            if answers:
                await self._answer(sink, data)
            else:
                await loop.sock_sendall(sink, data)

    async def _answer(self, sink: socket.socket, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        fault = self._proxy.fault
        if fault.rewrite is not None:
            at, self._answered = self._answered, self._answered + len(data)
            await loop.sock_sendall(sink, fault.rewrite(at, data))
            return
        while data:
            fault, size = self._proxy.fault, len(data)
            if fault.stopped:
                await self._proxy.pause(None)
                continue
            if fault.reset_after is not None:
                size = min(size, fault.reset_after - self._answered)
                if size <= 0:
                    raise ConnectionResetError
            if fault.bytes_per_s is not None:
                size = min(size, max(1, int(fault.bytes_per_s / 20)))
            await loop.sock_sendall(sink, data[:size])
            data = data[size:]
            self._answered += size
            if fault.reset_after is not None and self._answered >= fault.reset_after:
                raise ConnectionResetError
            if fault.bytes_per_s is not None:
                await self._proxy.pause(size / fault.bytes_per_s)
