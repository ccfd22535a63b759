"""Servers behind a router that die or freeze under load, and what is left after many requests."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import openai
import pytest
import server_child
from server_fleet import prefix, started
from server_process import request_bytes, running, wait_until

PROMPT = "A prompt goes to one server, and its answer comes from another one. " * 8
ASKED = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
QUICK = ("--health-interval", "0.2", "--health-timeout", "1")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("how", ["killed", "frozen"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_servers_that_die_under_load_cost_no_other_request_its_answer(
    model, server, tmp_path, role, how
):
    """Of two servers of each role one dies while 60 requests run; streams of it break off."""
    deadline_s = 20.0
    with started(model, tmp_path, 2, 2) as servers:
        options = (*QUICK, "--request-timeout", str(deadline_s))
        with running(None, tmp_path / "router", *servers.urls(), *options) as router:
            for number in range(4):
                assert router.post(ASKED | {"prompt": prefix(number)})[0] == 200
            victim = getattr(servers, role)[0]
            began = threading.Event()

            def ask(number: int):
                body = ASKED | {"prompt": prefix(number % 20) + str(number), "max_tokens": 40}
                started_at = time.monotonic()
                answer = router.post(body)
                began.set()
                return body, answer, time.monotonic() - started_at

            with ThreadPoolExecutor(12) as pool:
                asked = [pool.submit(ask, number) for number in range(60)]
                assert began.wait(60)
                os.kill(victim.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
                answered = [one.result() for one in asked]
            if how == "frozen":
                os.kill(victim.pid, signal.SIGCONT)
            assert max(took_s for *_, took_s in answered) < 2 * deadline_s + 1
            assert [answer[0] for _, answer, _ in answered] == [200] * 60
            for body, (_, answer, _), _ in answered[::5]:
                assert answer["choices"] == server.post(body)[1]["choices"]
            if how == "frozen":
                wait_until(servers.idle, "blocks come back")


def test_a_frozen_decode_server_alone_is_told_within_the_deadline(model, tmp_path):
    with started(model, tmp_path, 1, 1) as servers:
        limits = ("--request-timeout", "3", "--health-timeout", "30")
        with running(None, tmp_path / "router", *servers.urls(), *limits) as router:
            assert router.post(ASKED)[0] == 200
            with router.client() as client:
                stream = client.completions.create(
                    model="tiny",
                    prompt="a long answer",
                    max_tokens=4000,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                next(iter(stream))
                os.kill(servers.decode[0].pid, signal.SIGSTOP)
                stopped = time.monotonic()
                status, answer, _ = router.post(ASKED)
                assert (status, answer["error"]["code"]) == (504, "timeout")
                with pytest.raises(openai.APIError, match="broke off"):
                    list(stream)
                assert time.monotonic() - stopped < 60
            os.kill(servers.decode[0].pid, signal.SIGCONT)
            wait_until(servers.idle, "nothing is left")


def _status(client: socket.socket) -> bytes:
    try:
        return client.recv(65536)[9:12]
    except ConnectionError:
        return b"cut"


def _last_event(client: socket.socket) -> bytes:
    said = b""
    while b"[DONE]" not in said:
        piece = client.recv(65536)
        assert piece, said
        said = said[-2000:] + piece
    return said


def test_more_clients_than_descriptors_take_no_server_down(model, tmp_path):
    """Those that find no room are told; those that are answered go on."""
    child = server_child.route_with_few_descriptors
    with (
        started(model, tmp_path, 1, 1) as servers,
        running(None, tmp_path / "router", *servers.urls(), serve=child) as router,
    ):
        assert router.post(ASKED)[0] == 200

        long = {"max_tokens": 400, "ignore_eos": True, "stream": True}
        with ExitStack() as stack:

            def ask(number: int, **more: object) -> socket.socket:
                client = stack.enter_context(router.connect())
                with suppress(ConnectionError):
                    client.sendall(request_bytes(ASKED | {"prompt": prefix(number)} | more))
                return client

            streams = [ask(number, **long) for number in range(30)]
            assert {_status(one) for one in streams} == {b"200"}
            crowd = [ask(number) for number in range(30, 340)]
            assert {_status(one) for one in crowd} <= {b"200", b"503", b"cut"}
            for one in streams:
                assert b"broke off" not in _last_event(one)
        assert "is down" not in router.said()


@pytest.mark.timeout(600)  # of a thousand requests on a busy machine
def test_a_thousand_requests_leave_nothing(model, tmp_path):
    with (
        started(model, tmp_path, 2, 1) as servers,
        running(None, tmp_path / "router", *servers.urls()) as router,
    ):

        def ask(number: int) -> int:
            body = ASKED | {"prompt": prefix(number % 40) + str(number), "max_tokens": 2}
            if number % 7 == 0:
                with router.connect() as connection:
                    connection.sendall(request_bytes(body | {"max_tokens": 400}))
                return 200
            return router.post(body)[0]

        with ThreadPoolExecutor(6) as pool:
            statuses = Counter(pool.map(ask, range(1000)))
        assert statuses == {200: 1000}, router.said()
        wait_until(servers.idle, "nothing is left")
        wait_until(lambda: router.figure("kvconnect_route_running_requests") == 0, "forgotten")
