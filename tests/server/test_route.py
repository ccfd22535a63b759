"""Prefill and decode servers, and the router before them: equal tokens, locality, deaths."""

from __future__ import annotations

import operator
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from server_fleet import Servers, prefix, started
from server_process import ServerProcess, request_bytes, running, wait_until

PROMPT = "A prompt goes to one server, and its answer comes from another one. " * 8
ASKED = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
LONG = {"prompt": "a long answer", "max_tokens": 4000, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Two prefill servers and one decode server; tests leave them as they were."""
    with started(model, tmp_path_factory.mktemp("servers"), 2, 1) as some:
        yield some


@pytest.fixture(scope="module")
def router(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    output = tmp_path_factory.mktemp("router") / "output"
    # A server that counts as down on a busy machine counts as empty, too.
    options = ("--max-requests", "16", "--health-timeout", "60s")
    with running(None, output, *servers.urls(), *options) as one:
        yield one


def hit_tokens(servers: Servers) -> float:
    """Tokens of prompts that prefill servers had already."""
    return sum(one.figure("kvconnect_hit_tokens_total", tier="device") for one in servers.prefill)


@pytest.fixture
def prefill(servers: Servers) -> ServerProcess:
    return servers.prefill[0]


@pytest.fixture
def decode(servers: Servers) -> ServerProcess:
    return servers.decode[0]


def carried(body, prefill, **more):
    """What the prefill server gives for the decode server."""
    params = {"do_remote_decode": True} | more
    status, answer, _ = prefill.post(body | {"kv_transfer_params": params})
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == 0
    return answer["kv_transfer_params"]


# ------------------------------------------------------------------------------ from P to D


@pytest.mark.parametrize("n", [1, 2])
def test_the_answer_of_two_servers_is_that_of_one(prefill, decode, server, n):
    sampled = {"temperature": 1, "seed": 7} if n > 1 else {}
    body = ASKED | {"prompt": f"{n}: {PROMPT}", "n": n} | sampled
    _, alone, _ = server.post(body)
    given = carried(body, prefill)
    assert given["do_remote_prefill"]
    assert given["remote_num_tokens"] == alone["usage"]["prompt_tokens"] - 1
    status, answer, _ = decode.post(body | {"kv_transfer_params": given})
    assert status == 200
    assert [one["text"] for one in answer["choices"]] == [one["text"] for one in alone["choices"]]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > given["remote_num_tokens"] - 16 * n, "all but parts of a block"
    assert "kv_transfer_params" not in answer, "addresses are none of the client's business"
    wait_until(lambda: prefill.figure("kvconnect_device_blocks", state="used") == 0, "free")


def test_a_prompt_too_long_is_refused_with_the_clients_own_length(prefill):
    body = ASKED | {"prompt": "x" * 4090, "max_tokens": 77}
    status, answer, _ = prefill.post(body | {"kv_transfer_params": {"do_remote_decode": True}})
    assert status == 400
    assert "4090 tokens with max_tokens=77 exceed 4096 positions" in answer["error"]["message"]


def test_chats_are_handed_on_like_completions(prefill, decode, server):
    path = "/v1/chat/completions"
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "temperature": 0}
    _, handed, _ = prefill.post(body | {"kv_transfer_params": {"do_remote_decode": True}}, path)
    given = handed["kv_transfer_params"]
    _, answer, _ = decode.post(body | {"kv_transfer_params": given}, path)
    _, alone, _ = server.post(body, path)
    assert answer["choices"] == alone["choices"]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == given["remote_num_tokens"] // 16 * 16


def test_both_may_be_asked_at_the_same_time(prefill, decode, server):
    body = ASKED | {"prompt": f"streamed {PROMPT}"}
    where = ASKED | {"prompt": "where is it?"}
    known = carried(where, prefill)
    assert decode.post(where | {"kv_transfer_params": known})[0] == 200
    fetch = {name: known[name] for name in ("remote_host", "remote_port")}
    fetch |= {"do_remote_prefill": True, "transfer_id": "at the same time"}
    connection = decode.connect()
    try:
        connection.sendall(request_bytes(body | {"kv_transfer_params": fetch}))
        wait_until(lambda: decode.live() == 1, "the decode server waits for the prompt")
        carried(body, prefill, transfer_id="at the same time")
        answer = b""
        while b'"text"' not in answer:
            answer += connection.recv(65536)
    finally:
        connection.close()
    _, alone, _ = server.post(body)
    cached = f'"cached_tokens":{(alone["usage"]["prompt_tokens"] - 1) // 16 * 16}'
    assert cached.encode() in answer


# ------------------------------------------------------------------------------ the same answers


def test_answers_are_those_of_one_server(router, servers, server):
    transferred = servers.decode[0].figure("kvconnect_hit_tokens_total", tier="store")
    num_tokens = 0
    for number in range(4):  # the first ones one after the other, then layer by layer
        body = ASKED | {"prompt": f"{number} {PROMPT}"}
        _, alone, _ = server.post(body)
        status, answer, _ = router.post(body)
        assert status == 200
        assert answer["choices"] == alone["choices"]
        assert "kv_transfer_params" not in answer
        num_tokens += alone["usage"]["prompt_tokens"] - 1
    assert servers.decode[0].figure("kvconnect_hit_tokens_total", tier="store") == (
        transferred + num_tokens
    ), "every prompt was fetched"
    assert router.figure("kvconnect_route_computed_by_decode_total") == 0
    wait_until(servers.idle, "nothing is left")


@pytest.mark.parametrize("stream", [False, True])
def test_the_official_client_sees_no_difference(router, server, stream):
    def ask(one):
        chat = {"messages": [{"role": "user", "content": f"{stream} {PROMPT}"}]}
        with one.client() as client:
            answer = client.chat.completions.create(
                model="tiny", max_tokens=12, temperature=0, stream=stream, **chat
            )
            if not stream:
                return answer.choices[0].message.content
            return "".join(chunk.choices[0].delta.content or "" for chunk in answer)

    assert ask(router) == ask(server) != ""


def test_what_servers_refuse_is_told_as_they_say_it(router, server):
    for body in ({"prompt": PROMPT, "max_tokens": -1}, {"promt": ""}, ASKED | {"model": "other"}):
        assert router.post(body)[:2] == server.post(body)[:2]
    assert router.post(b"", "/v1/models", method="GET")[1]["data"][0]["id"] == "tiny"
    assert router.post(b"", "/v1/models/no", method="GET")[0] == 404
    health = router.post(b"", "/health", method="GET")[1]
    assert health == {"status": "ok", "prefill": "2 of 2 up", "decode": "1 of 1 up"}


# ------------------------------------------------------------------------------ where to


def repeats_that_hit(router, servers, prefixes):
    """The part of `prefixes` that is found when each comes again."""
    before = hit_tokens(servers)
    with ThreadPoolExecutor(4) as pool:
        for ending in ("first", "again"):
            bodies = [ASKED | {"prompt": prefix(n) + ending, "max_tokens": 1} for n in prefixes]
            assert {answer[0] for answer in pool.map(router.post, bodies)} == {200}
            wait_until(servers.idle, "prefill servers have counted, too")
    return (hit_tokens(servers) - before) / (512 * len(prefixes))


def test_repeats_go_to_the_server_that_holds_them(router, servers):
    before = [one.figure("kvconnect_requests_total") for one in servers.prefill]
    assert repeats_that_hit(router, servers, range(12)) >= 0.9
    used = [one.figure("kvconnect_requests_total") for one in servers.prefill]
    # How many each gets depends on which one is faster on a busy machine.
    assert all(map(operator.lt, before, used)), "and both work"


# ------------------------------------------------------------------------------ clients


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_client_that_leaves_ends_its_request_everywhere(router, servers, stream):
    with router.connect() as connection:
        connection.sendall(request_bytes(LONG | {"stream": stream, "prompt": f"leave {stream}"}))
        wait_until(lambda: servers.decode[0].live() == 1, "it runs")
    wait_until(servers.idle, "it is ended")
    wait_until(
        lambda: router.figure("kvconnect_route_running_requests") == 0, "it is forgotten", 30
    )


def test_more_than_the_router_takes_are_told_to_come_again(router, servers):
    with ExitStack() as stack:
        for _ in range(16):
            stack.enter_context(router.connect()).sendall(request_bytes(LONG))
        wait_until(lambda: servers.decode[0].live() == 16, "all places are taken")
        status, answer, headers = router.post(ASKED)
        assert (status, answer["error"]["message"][:11]) == (429, "16 requests")
        assert headers["retry-after"] == "1"
    wait_until(servers.idle, "they are ended")


# ------------------------------------------------------------------------------ the end


def test_a_signal_lets_requests_end(servers, tmp_path):
    with running(None, tmp_path / "router", *servers.urls()) as router:
        with router.connect() as connection:
            connection.sendall(request_bytes(LONG | {"max_tokens": 200, "stream": True}))
            answer = connection.recv(65536)
            assert b"200 OK" in answer
            os.kill(router.pid, signal.SIGTERM)
            while b"[DONE]" not in answer:
                piece = connection.recv(65536)
                assert piece, "it was cut"
                answer += piece
            assert b'"finish_reason":"length"' in answer
        assert router.wait() == 0
