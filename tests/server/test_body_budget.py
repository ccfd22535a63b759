"""What the bodies of all requests may take of memory together."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest
from server_process import running, wait_until

from kvconnect.server.admission import Admission
from kvconnect.server.errors import Busy

KiB = 1 << 10
BODY = 128 * KiB
FILL = 128
"""Clients whose bodies are all that may be: of each, what is beyond 64 KiB counts."""
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
    with ExitStack() as clients:
        slow = [clients.enter_context(slow_client(router)) for _ in range(FILL)]
        little = body_of(64 * KiB + FILL + 1)

        def full() -> bool:
            if router.post(little)[0] == 429:
                return True
            # One of them came while there was no room for it, and does not count any more.
            slow.append(clients.enter_context(slow_client(router)))
            return False

        wait_until(full, "all bodies are read", CLIENT_S)
        status, answer, headers = router.post(body_of(BODY))
        assert (status, headers["retry-after"]) == (429, "1")
        assert answer["error"]["code"] == "queue_full"
        assert "bodies" in answer["error"]["message"]
        # Others do not notice: of this one nothing counts.
        status, answer, _ = router.post(body_of(60 * KiB))
        assert (status, answer["error"]["code"]) == (503, "no_decode_server")
        late = clients.enter_context(slow_client(router))
        late.sendall(b"}")
        assert late.recv(100).startswith(b"HTTP/1.1 429 ")
        for one in slow[: FILL // 2]:
            one.sendall(b"}")
            assert one.recv(100)[:13] in {b"HTTP/1.1 503 ", b"HTTP/1.1 429 "}
        status, answer, _ = router.post(body_of(BODY))
        assert (status, answer["error"]["code"]) == (503, "no_decode_server")
    wait_until(lambda: router.post(body_of(BODY))[0] == 503, "others left")


def test_what_is_refused_counts_no_more():
    admission = Admission(8, 100)
    with admission.enter() as first, admission.enter() as second:
        admission.hold(first, 64 * KiB + 60)
        with pytest.raises(Busy, match="have 60 bytes, and may have 100"):
            admission.hold(second, 64 * KiB + 41)
        admission.hold(second, 64 * KiB + 40)
        admission.hold(first, 0)
        admission.hold(second, 64 * KiB + 100)
    with admission.enter() as third:
        admission.hold(third, 64 * KiB + 100)
        with pytest.raises(Busy):
            admission.hold(third, 64 * KiB + 101)
