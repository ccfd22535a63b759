"""Connections of clients that mean harm, without an engine behind them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import uvicorn
from server_process import wait_until

from kvconnect.server.http import connection
from kvconnect.server.http.connection import Connection

LIMIT = 20
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
WAITS = b"GET /waits HTTP/1.1\r\nHost: x\r\n\r\n"


class Harness:
    """A server whose answer to `/waits` never comes, that to `/early` before its request's body.

    That to `/begins`, too, and does not end.
    """

    def __init__(self) -> None:
        self.read: list[int] = []
        self.left = threading.Event()
        self.made: list[asyncio.Transport] = []
        read, made = self.read, self.made

        class Counting(Connection.with_timeout(120.0)):
            def connection_made(self, transport: asyncio.Transport) -> None:
                made.append(transport)
                super().connection_made(transport)

            def data_received(self, data: bytes) -> None:
                read.append(len(data))
                super().data_received(data)

        config = uvicorn.Config(
            self._answer,
            http=Counting,
            interface="asgi3",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            limit_concurrency=LIMIT,
        )
        self.server = uvicorn.Server(config)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self.server.run, args=([self._listener],))
        self._thread.start()
        wait_until(lambda: self.server.started, "it listens")

    async def _answer(self, scope, receive, send) -> None:
        if scope["path"] in {"/early", "/begins"}:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            more = scope["path"] == "/begins"
            await send({"type": "http.response.body", "body": b"x", "more_body": more})
        while (message := await receive())["type"] != "http.disconnect":
            if scope["path"] == "/" and not message["more_body"]:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body"})
                return
        self.left.set()

    @property
    def connections(self) -> int:
        return len(self.server.server_state.connections)

    def connect(self) -> socket.socket:
        return socket.create_connection(self._listener.getsockname(), timeout=60)

    def close(self) -> None:
        self.server.should_exit = self.server.force_exit = True
        self._thread.join()


@pytest.fixture
def harness() -> Iterator[Harness]:
    one = Harness()
    yield one
    one.close()


def test_a_little_is_read_at_a_time(harness):
    with harness.connect() as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        client.sendall(b"x" * 1_000_000)
        assert client.recv(100).startswith(b"HTTP/1.1 200 ")
    assert max(harness.read) <= 16 << 10


def test_what_is_sent_in_pieces_waits_for_no_acknowledgement(harness):
    with harness.connect() as client:
        client.sendall(GET)
        assert client.recv(100).startswith(b"HTTP/1.1 200 ")
        accepted = harness.made[0].get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_client_that_leaves_after_sending_ahead_is_noticed(harness):
    with harness.connect() as client:
        client.sendall(WAITS)
        for length in (1, 2, 3):
            wait_until(lambda length=length: len(harness.read) == length, "it is read")
            client.sendall(GET)
    assert harness.left.wait(60)


def test_a_client_that_sends_far_ahead_is_cut(harness):
    with harness.connect() as client:
        client.sendall(WAITS)
        with pytest.raises(ConnectionError):
            client.sendall(GET * 1_000_000)
    assert harness.left.wait(60)


@pytest.mark.parametrize("path", ["/early", "/begins"])
def test_a_body_that_is_broken_after_its_answer_began_is_cut(harness, caplog, path):
    with harness.connect() as client:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.sendall(head.encode())
        assert client.recv(100).startswith(b"HTTP/1.1 200 ")
        client.sendall(b"no number\r\n")
        with contextlib.suppress(ConnectionError):
            while client.recv(100):
                pass
    wait_until(lambda: harness.connections == 0, "it is gone")
    assert not caplog.records  # or clients could fill the log


def test_connections_far_beyond_the_limit_are_cut_at_once(harness, monkeypatch):
    monkeypatch.setattr(connection, "_TOLD_WITHIN_S", 60.0)
    with ExitStack() as stack:
        for _ in range(LIMIT + 200):
            stack.enter_context(harness.connect())
        wait_until(lambda: len(harness.made) == LIMIT + 200, "all are accepted")
        # Their time for a request is 120 s.
        wait_until(lambda: harness.connections <= LIMIT + 64, "most are cut at once")


def test_connections_beyond_the_limit_are_told_and_then_cut(harness):
    with ExitStack() as stack:
        for _ in range(LIMIT + 40):
            stack.enter_context(harness.connect())
        wait_until(lambda: len(harness.made) == LIMIT + 40, "all are accepted")
        wait_until(lambda: harness.connections <= LIMIT, "those beyond it are cut soon")
        with harness.connect() as late:
            late.sendall(GET)
            head, _, body = b"".join(iter(lambda: late.recv(65536), b"")).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1" in head.lower()
            assert json.loads(body)["error"]["code"] == "too_many_connections"
    wait_until(lambda: harness.connections == 0, "they are gone")
    with harness.connect() as next_one:
        next_one.sendall(GET)
        assert next_one.recv(100).startswith(b"HTTP/1.1 200 ")
