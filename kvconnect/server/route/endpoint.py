"""Answers one request at the router, from its body to the end of its answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import TypeAlias

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from kvconnect.server.admission import Admission
from kvconnect.server.errors import RequestRefused, ShuttingDown
from kvconnect.server.http.body import read_json
from kvconnect.server.http.disconnect import while_connected
from kvconnect.server.http.event_stream import error_events
from kvconnect.server.route.client import ServerAnswered
from kvconnect.server.route.fleet import Fleet
from kvconnect.server.route.handover import Handover
from kvconnect.server.route.instance import InstanceFailed
from kvconnect.server.route.opened import Opened
from kvconnect.server.route.routed import RoutedRequest
from kvconnect.trace import trace_headers

Routed: TypeAlias = Callable[
    [Mapping[str, str]], contextlib.AbstractContextManager[Mapping[str, str]]
]
"""Called with the headers that name a client's trace, for those that the servers get."""


class RouteEndpoint:
    """An ASGI application that forwards requests to the servers behind it.

    A request whose client disconnects is aborted on all servers, at any stage.

    Args:
        fleet: the fleet of the servers.
        admission: shared by all endpoints.
        parsing: one thread, where long bodies are parsed.
        routed: entered for each request, with the headers that name the client's trace; yields
            those for the servers.
    """

    def __init__(
        self,
        fleet: Fleet,
        admission: Admission,
        parsing: Executor,
        routed: Routed = contextlib.nullcontext,
    ) -> None:
        self._fleet = fleet
        self._admission = admission
        self._parsing = parsing
        self._routed = routed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        with contextlib.suppress(ClientDisconnect), self._admission.enter() as ticket:
            request = await read_json(
                Request(scope, receive),
                self._fleet.settings,
                self._parsing,
                partial(RoutedRequest.of, scope["path"]),
                ticket,
            )
            self._admission.extend(ticket, 1)
            running = _Running()
            headers = trace_headers(Headers(scope=scope))
            running.task = asyncio.create_task(self._answer(running, request, headers, send))
            self._admission.submitted(ticket, (running,))
            try:
                await while_connected(receive, running.task)
            except asyncio.CancelledError:
                if running.aborted:
                    raise ShuttingDown from None
                raise

    async def _answer(
        self, running: _Running, request: RoutedRequest, headers: Mapping[str, str], send: Send
    ) -> None:
        with self._routed(headers) as carried:
            handover = Handover(self._fleet, request, carried)
            try:
                async with handover.answer() as opened:
                    await self._pass_on(running, opened, handover.until, send)
            except ServerAnswered as answered:
                told = {"content-type": "application/json"}
                await _start(send, answered.status, told, answered.body)

    async def _pass_on(self, running: _Running, opened: Opened, until: float, send: Send) -> None:
        more = opened.rest is not None
        await _start(send, opened.status, opened.headers, opened.beginning, more=more)
        if opened.rest is None:
            return
        last = b""
        try:
            async with opened.instance.answering(until):
                async for piece in opened.rest:
                    await _send(send, piece)
                    # Many pieces may have arrived: this lets other requests run, and notices a
                    # disconnected client.
                    await asyncio.sleep(0)
        except InstanceFailed as failed:
            last = error_events(RequestRefused(503, f"the answer broke off: {failed}"))
        except asyncio.CancelledError:
            if not running.aborted:
                raise
            last = error_events(ShuttingDown())
        await _send(send, last, more=False)


class _Running:
    """A running request that a shutdown can abort."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.aborted = False

    @property
    def done(self) -> bool:
        """Returns whether the request has ended."""
        return self.task is not None and self.task.done()

    def abort(self) -> None:
        """Aborts the request, with an error to its client."""
        self.aborted = True
        if self.task is not None:
            self.task.cancel()


async def _start(
    send: Send, status: int, headers: Mapping[str, str], beginning: bytes, *, more: bool = False
) -> None:
    sent = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    if not more:
        sent.append((b"content-length", str(len(beginning)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": sent})
    await _send(send, beginning, more=more)


async def _send(send: Send, piece: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": more})
