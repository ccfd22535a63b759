"""Closes connections whose client makes no progress."""

from __future__ import annotations

import asyncio
import socket
from typing import ClassVar

import h11
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from kvconnect.server.errors import ErrorAnswer

_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""The keep-alive options by which the loss of a client's machine is noticed within a minute."""

_SEND_BUFFER_NBYTES = 128 << 10
"""The size of the send buffer; the system's default is megabytes for a client that never reads."""

_AHEAD_NBYTES = 64 << 10
"""The bytes that a client may send beyond a request before its answer; more disconnect it."""

_READ_NBYTES = 16 << 10
"""The bytes read at a time.

In chunks of one byte, this much takes 30 ms to parse while all others wait."""

_TOLD = 64
"""The connections beyond the limit that get an answer. Further ones are closed at once."""
_TOLD_WITHIN_S = 1.0


class Connection(H11Protocol):
    """A client's connection, with deadlines for the client.

    A whole request must arrive within `timeout_s` of its first byte, and the first request within
    `timeout_s` of the connection's start. A client that reads nothing for `timeout_s`, or too
    little for the transport to write more, is disconnected. Between requests, uvicorn's keep-alive
    timeout applies. Requests on connections beyond ``limit_concurrency`` are answered with OpenAI's
    error object.
    """

    timeout_s: ClassVar[float]

    _reading: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None

    @classmethod
    def with_timeout(cls, timeout_s: float) -> type[Connection]:
        """Returns the class whose connections have this deadline."""
        return type("Connection", (cls,), {"timeout_s": timeout_s})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the deadline of the first request."""
        self._within, self._limit = self.app, self.limit_concurrency
        self.limit_concurrency = None  # uvicorn's own answer is a text
        super().connection_made(transport)
        transport.max_size = _READ_NBYTES  # type: ignore[attr-defined]  # asyncio's name for it
        connected: socket.socket = transport.get_extra_info("socket")
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_NBYTES)
        unacknowledged = (socket.TCP_USER_TIMEOUT, int(1000 * self.timeout_s))
        # Otherwise an answer in two pieces waits 40 ms for an acknowledgement: asyncio sets this
        # for sockets only that name their protocol.
        at_once = (socket.TCP_NODELAY, 1)
        for option, value in (*_KEEPALIVE, unacknowledged, at_once):
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
        beyond = len(self.connections) - (self._limit or len(self.connections))
        if beyond > _TOLD:
            transport.abort()
        timeout_s = min(self.timeout_s, _TOLD_WITHIN_S) if beyond > 0 else self.timeout_s
        self._reading = self.loop.call_later(timeout_s, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Starts the deadline for the rest of a request, or ends it once the request is whole."""
        under_way = max(len(self.connections), len(self.tasks))
        full = self._limit is not None and under_way >= self._limit
        self.app = _too_many if full else self._within
        super().data_received(data)
        if self._request_is_whole():
            self._stop_reading()
            self._go_on_reading()
        elif self._reading is None:
            self._reading = self.loop.call_later(self.timeout_s, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are no HTTP, or closes a connection whose answer has begun."""
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            super().send_400_response(msg)
        else:  # uvicorn would raise, and each such client fill the log
            self.transport.abort()

    def _request_is_whole(self) -> bool:
        # uvicorn keeps the last request's cycle until the head of the next one has arrived.
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.more_body and not cycle.response_complete

    def _go_on_reading(self) -> None:
        # Uvicorn would read no more once something follows the request that it answers, and not
        # notice either that the client left.
        ahead, _ = self.conn.trailing_data
        if len(ahead) > _AHEAD_NBYTES:
            self.transport.abort()
        else:
            self.flow.resume_reading()

    def pause_writing(self) -> None:
        """Starts the deadline of a client that reads more slowly than is written."""
        super().pause_writing()
        if self._writing is None:
            self._writing = self.loop.call_later(self.timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Ends the deadline for the client to read."""
        super().resume_writing()
        self._stop_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels all deadlines."""
        self._stop_reading()
        self._stop_writing()
        super().connection_lost(exc)

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _stop_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None


async def _too_many(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers on connections beyond the limit, and closes them."""
    answer = ErrorAnswer(503, "there are too many connections", "too_many_connections")
    headers = answer.headers | {"Connection": "close"}
    await JSONResponse(answer.body, answer.status, headers)(scope, receive, send)
