"""Carries one client's bytes through a `TcpProxy` to the server and back, with its fault."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Self

from kvconnect.testing.faults.tcp_fault import TcpFault

__all__ = ["ProxiedConnection", "TcpRoute"]

_CHUNK = 65536
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 seconds: close() sends RST


class TcpRoute:
    """The server of a proxy and its present fault. All methods run on the proxy's loop.

    Attributes:
        server: host and port of new connections.
        fault: the present fault; call `wake` after changing it.
    """

    def __init__(self, server: tuple[str, int]) -> None:
        self.server = server
        self.fault = TcpFault()
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """Ends every `pause`."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def pause(self, seconds: float | None) -> None:
        """Sleeps until `seconds` are over or the fault changes."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    async def dial(self) -> socket.socket:
        """Returns a connection to the server."""
        upstream = socket.socket()
        upstream.settimeout(0)
        try:
            await asyncio.get_running_loop().sock_connect(upstream, self.server)
        except BaseException:
            upstream.close()
            raise
        return upstream


class ProxiedConnection:
    """A client and its own connection to the server. All methods run on the proxy's loop.

    Args:
        route: the route to the server.
        client: a connected client, closed when either side closes.
    """

    def __init__(self, route: TcpRoute, client: socket.socket) -> None:
        self._route = route
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
            while self._route.fault.stopped:
                await self._route.pause(None)
            self._upstream = await self._route.dial()
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
                delay = self._route.fault.delay_s if answers else 0.0
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
            while self._route.fault.stopped:
                await self._route.pause(None)
            while due > loop.time() and self._route.fault.delay_s:
                await self._route.pause(due - loop.time())
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
        fault = self._route.fault
        if fault.rewrite is not None:
            at, self._answered = self._answered, self._answered + len(data)
            await loop.sock_sendall(sink, fault.rewrite(at, data))
            return
        while data:
            fault, size = self._route.fault, len(data)
            if fault.stopped:
                await self._route.pause(None)
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
                await self._route.pause(size / fault.bytes_per_s)
