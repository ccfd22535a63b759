"""Clients that vanish, stall, or come in crowds: the engine goes on with the others."""

from __future__ import annotations

import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import openai
import pytest
from server_process import request_bytes, wait_until

LONG = {"prompt": "a long answer", "max_tokens": 4000, "ignore_eos": True, "temperature": 0}
ONE = {"model": "tiny", "prompt": "one", "max_tokens": 4, "temperature": 0}


def vanish(connection: socket.socket) -> None:
    """Close it as a crash does: with a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leave", [socket.socket.close, vanish])
def test_a_client_that_leaves_ends_its_request(server, stream, leave):
    left = server.figure("kvconnect_http_answers_total", status="499")
    connection = server.connect()
    connection.sendall(request_bytes(LONG | {"stream": stream, "n": 3, "temperature": 1}))
    wait_until(lambda: server.live() == 3, "the completions run")
    leave(connection)
    wait_until(lambda: server.live() == 0, "they are aborted")
    now = server.figure("kvconnect_http_answers_total", status="499")
    assert now == left + (not stream), "it was not answered in full before"
    wait_until(
        lambda: server.figure("kvconnect_device_blocks", state="used") == 0,
        "their blocks are free",
        10,
    )


def test_requests_sent_ahead_are_answered_in_order(server):
    with server.connect() as connection:
        health = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        connection.sendall(request_bytes(ONE) + health)
        connection.sendall(health + health.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        answers = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answers.count(b"HTTP/1.1 200 ") == 4
    assert answers.index(b"text_completion") < answers.index(b'{"status":"ok"}')


def test_a_client_that_leaves_before_its_body_is_forgotten(server):
    whole = request_bytes(LONG)
    before = server.figure("kvconnect_http_answers_total", status="499")
    for length in (1, 50, len(whole) - 1):
        with server.connect() as connection:
            connection.sendall(whole[:length])
    wait_until(
        lambda: server.figure("kvconnect_http_answers_total", status="499") == before + 1,
        "the one whose head came whole is noticed",
    )
    with ExitStack() as stack:  # none of them takes a place
        for _ in range(16):
            stack.enter_context(server.connect()).sendall(request_bytes(LONG))
        wait_until(lambda: server.live() == 16, "all places are taken")
    wait_until(lambda: server.live() == 0, "they are free again")


def test_more_than_run_and_wait_are_told_to_come_again(server, client):
    with ExitStack() as stack:
        for _ in range(16):
            stack.enter_context(server.connect()).sendall(request_bytes(LONG))
        wait_until(lambda: server.live() == 16, "all places are taken")
        with pytest.raises(openai.RateLimitError, match="16 completions run or wait") as raised:
            client.completions.create(**ONE)
        assert int(raised.value.response.headers["Retry-After"]) >= 1
        assert server.post(ONE, "/health", method="GET")[0] == 200
    # The official client does come again.
    with server.client(max_retries=10) as patient:
        assert patient.completions.create(**ONE).usage.completion_tokens
    wait_until(lambda: server.live() == 0, "they are free again")


def test_a_slow_reader_is_cut_and_holds_up_nobody(server):
    with server.connect(receive_buffer=4096) as slow:
        body = LONG | {"stream": True, "logprobs": 20}
        slow.sendall(request_bytes(body))
        wait_until(lambda: server.live() == 1, "it runs")
        began = time.monotonic()
        answer = bytearray()
        slow.settimeout(1.0)  # if the server's TCP gives it up, it hears nothing of that
        while server.live():
            assert server.post(ONE)[0] == 200
            with suppress(ConnectionResetError, TimeoutError):
                answer += slow.recv(128)  # so that TCP itself sees it get on
            # 1.5 s of patience, once the buffers on the way are full.
            assert time.monotonic() < began + 60
        with suppress(ConnectionResetError, TimeoutError):
            while piece := slow.recv(65536):
                answer += piece
        assert b"[DONE]" not in answer


def test_a_request_that_does_not_come_is_not_waited_for(server):
    def waits(first: bytes, rest: bytes) -> float:
        with server.connect() as idle:
            if first:
                idle.sendall(first)
                answered = b""
                while not answered.endswith(b"}}}"):  # the end of the usage, and of all
                    answered += idle.recv(65536)
                assert answered.startswith(b"HTTP/1.1 200 ")
            idle.sendall(rest)
            began = time.monotonic()
            told = b""
            with suppress(ConnectionResetError):
                while piece := idle.recv(65536):
                    told += piece
            assert told == b"" or told.startswith(b"HTTP/1.1 408 ")
            return time.monotonic() - began

    one, part = request_bytes(ONE), b"POST /v1/comp"
    cases = [(b"", b""), (b"", part), (b"", one[:-5]), (one, part), (one, one[:-5])]
    with ThreadPoolExecutor(len(cases)) as threads:
        waited = list(threads.map(lambda case: waits(*case), cases))
    # A 408 leaves the connection open for as long as any other answer does.
    assert max(waited) < 60


def test_a_crowd_of_clients_each_gets_its_own_answer(server):
    with server.client() as client:

        def ask(number: int) -> str:
            prompt = f"client number {number}"
            answer = client.completions.create(**ONE | {"prompt": prompt, "max_tokens": 8})
            return answer.choices[0].text

        alone = [ask(number) for number in range(16)]
        with ThreadPoolExecutor(16) as threads:
            assert list(threads.map(ask, range(16))) == alone
