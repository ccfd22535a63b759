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
import socket
import threading
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

from kvconnect.testing.faults.tcp_connection import ProxiedConnection, TcpRoute
from kvconnect.testing.faults.tcp_fault import TcpFault

__all__ = ["TcpProxy"]

T = TypeVar("T")


class TcpProxy:
    """Listens on a port of 127.0.0.1 and forwards to ``host:port``, with the fault that is set.

    Its methods may be called from any thread; each returns once its effect is complete (after
    milliseconds). `close` releases everything, whatever fault is set.

    Attributes:
        host, port: the proxy's address, which never changes.
    """

    host = "127.0.0.1"

    def __init__(self, host: str, port: int) -> None:
        self._route = TcpRoute((host, port))
        self._accepted = 0
        self._connections: set[ProxiedConnection] = set()
        self._fillers: list[socket.socket] = []
        self._listener = _listen((self.host, 0))
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kvconnect-tcp-proxy", daemon=True)
        self._thread.start()
        self._call(self._start())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def fault(self) -> TcpFault:
        """The present fault."""
        return self._route.fault

    @property
    def accepted(self) -> int:
        """The number of connections so far."""
        return self._accepted

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
        self._route.server = (host, port)

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

    async def _start(self) -> None:
        self._start_accepting()

    async def _stop(self) -> None:
        self._stop_accepting()
        self._listener.close()
        self._drop_fillers()
        await self._reset_all()

    async def _set(self, fault: TcpFault) -> None:
        before, self._route.fault = self._route.fault, fault
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
        self._route.wake()

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
        self._accepted += 1
        connection = ProxiedConnection(self._route, client)
        self._connections.add(connection)
        connection.start(self._connections.discard)


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
