"""What the bodies of all requests may take of memory together."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest
from server_process import running

from kvconnect.errors import ConfigurationError
from kvconnect.server.admission import Admission
from kvconnect.server.errors import Busy

KiB = 1 << 10
BODY = 128 * KiB
FILL = 64
"""Clients whose bodies are twice what may be read at once; 64 KiB of each do not count."""
CLIENT_S = 20


def body_of(nbytes: int) -> bytes:
    beginning, end = b'{"model": "tiny", "prompt": "', b'"}'
    return beginning + b"x" * (nbytes - len(beginning) - len(end)) + end


@pytest.fixture(scope="module")
def router(tmp_path_factory):
    with socket.create_server(("127.0.0.1", 0)) as nowhere:
        port = nowhere.getsockname()[1]
    output = tmp_path_factory.mktemp("budget") / "output"
    options = ("--max-body", "128KiB", "--max-requests", "400", "--client-timeout", str(CLIENT_S))
    with running(None, output, "--decode", f"http://127.0.0.1:{port}", *options) as one:
        yield one


def slow_client(router) -> socket.socket:
    """All of a body is sent but its last byte."""
    connection = router.connect()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {BODY}\r\n\r\n".encode() + body_of(BODY)[:-1])
    return connection


def test_bodies_of_slow_clients_do_not_fill_the_memory(router):
    """A quarter of the budget is theirs; beyond it the oldest one goes, and others come through."""
    with ExitStack() as clients:
        slow = [clients.enter_context(slow_client(router)) for _ in range(FILL)]
        for one in slow[: FILL // 2]:
            answer = one.recv(1000)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b"connection: close" in answer.lower()
        status, answer, _ = router.post(body_of(BODY))
        assert (status, answer["error"]["code"]) == (503, "no_decode_server")
        youngest = slow[-1]
        youngest.sendall(b"}")
        assert youngest.recv(100).startswith(b"HTTP/1.1 503 "), "it was given the time"


def test_bodies_that_never_come_whole_keep_out_no_others(router):
    """They are no requests that run: 400 of these may."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with ExitStack() as clients:
        idle = [clients.enter_context(router.connect()) for _ in range(450)]
        for one in idle:
            one.sendall(head + b"Content-Length: 9\r\n\r\n{")
        for one in idle[: 450 - 256]:
            assert one.recv(100).startswith(b"HTTP/1.1 408 ")
        for _ in range(5):
            status, answer, _ = router.post(body_of(100))
            assert (status, answer["error"]["code"]) == (503, "no_decode_server")


async def test_what_is_refused_counts_no_more():
    admission = Admission(8, 100)
    with admission.enter() as first, admission.enter() as second:
        first.hold(64 * KiB + 60)
        with pytest.raises(Busy, match="have 60 bytes, and may have 100"):
            second.hold(64 * KiB + 41)
        second.hold(64 * KiB + 40)
        first.hold(0)
        second.hold(64 * KiB + 100)
    with admission.enter() as third:
        third.hold(64 * KiB + 100)
        with pytest.raises(Busy):
            third.hold(64 * KiB + 101)


async def test_what_is_read_takes_no_room_from_what_runs():
    admission = Admission(1, 100)
    with admission.enter() as running, admission.enter() as other:
        async with other.reading(30):
            other.hold(64 * KiB + 20)
            assert admission.completions == 0
            running.hold(64 * KiB + 100)
            admission.extend(running, 1)
        with pytest.raises(Busy, match="have 100 bytes, and may have 100"):
            other.hold(64 * KiB + 20)
        with pytest.raises(Busy, match="1 completions run or wait"):
            admission.extend(other, 1)


async def test_log_probabilities_are_held_within_a_budget():
    admission = Admission(8, 100)
    most = 1 << 22
    with admission.enter() as first, admission.enter() as second:
        with pytest.raises(ConfigurationError, match=f"{most + 1} log probabilities .* lower"):
            admission.extend(first, 1, most + 1)
        admission.extend(first, 1, most - 5)
        with pytest.raises(Busy, match="log probabilities"):
            admission.extend(second, 1, 6)
        admission.extend(second, 1, 5)
        assert admission.completions == 2
    with admission.enter() as third:
        admission.extend(third, 1, most)
