"""Prefill and decode servers, and whose kv_transfer_params they take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess, request_bytes, running, wait_until
from starlette.datastructures import Headers

from kvconnect.errors import ConfigurationError
from kvconnect.server.errors import RequestRefused
from kvconnect.server.openai.completion_request import CompletionRequest
from kvconnect.server.openai.kv_transfer import KvTransferParams
from kvconnect.server.settings import ServerSettings
from kvconnect.server.trust import ROUTER_SECRET_HEADER, check_transfer

PROMPT = "Whatever one server computes, another one need not compute again. " * 3
ASKED = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
SECRET = "of the router and its servers"
FETCH = {"do_remote_prefill": True, "transfer_id": "one", "remote_port": 7600}


@pytest.fixture(scope="module")
def prefill(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    output = tmp_path_factory.mktemp("prefill") / "output"
    with running(model, output, "--role", "prefill", "--kv-cache-tokens", "8192") as one:
        yield one


@pytest.fixture(scope="module")
def decode(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    output = tmp_path_factory.mktemp("decode") / "output"
    with running(model, output, "--role", "decode", "--kv-cache-tokens", "8192") as one:
        yield one


def settings(**fields: object) -> ServerSettings:
    return ServerSettings(model_name="tiny", **fields)


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
    assert cached >= given["remote_num_tokens"] - 16 * (n - 1)
    assert "kv_transfer_params" not in answer, "addresses are none of the client's business"
    wait_until(lambda: prefill.figure("kvconnect_device_blocks", state="used") == 0, "free", 10)


def test_chats_are_handed_on_like_completions(prefill, decode, server):
    path = "/v1/chat/completions"
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "temperature": 0}
    _, handed, _ = prefill.post(body | {"kv_transfer_params": {"do_remote_decode": True}}, path)
    given = handed["kv_transfer_params"]
    _, answer, _ = decode.post(body | {"kv_transfer_params": given}, path)
    _, alone, _ = server.post(body, path)
    assert answer["choices"] == alone["choices"]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == given["remote_num_tokens"]


def test_both_may_be_asked_at_the_same_time(prefill, decode, server):
    body = ASKED | {"prompt": f"streamed {PROMPT}"}
    known = carried(ASKED | {"prompt": "where is it?"}, prefill)
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
    cached = f'"cached_tokens":{alone["usage"]["prompt_tokens"] - 1}'
    assert cached.encode() in answer


def test_what_was_never_handed_out_is_computed(decode, server):
    body = ASKED | {"prompt": f"nowhere {PROMPT}"}
    given = {"do_remote_prefill": False, "remote_engine_id": "gone"}
    _, answer, _ = decode.post(body | {"kv_transfer_params": given})
    assert answer["choices"] == server.post(body)[1]["choices"]


def test_a_role_does_only_its_own_part(prefill, decode):
    fetch = FETCH | {"remote_host": "127.0.0.1"}
    for one, params in ((prefill, fetch), (decode, {"do_remote_decode": True})):
        status, answer, _ = one.post(ASKED | {"kv_transfer_params": params})
        assert (status, "this server has role" in answer["error"]["message"]) == (400, True)
        assert one.post(ASKED)[0] == 200, "but it answers ordinary requests"


# ------------------------------------------------------------------------------ whose they are


@pytest.mark.parametrize(
    "params", [{"do_remote_decode": True}, FETCH | {"remote_host": "127.0.0.1"}, {}]
)
def test_a_server_without_a_role_takes_none(server, params):
    status, answer, _ = server.post(ASKED | {"kv_transfer_params": params})
    assert (status, answer["error"]["code"]) == (403, "kv_transfer_not_served")


@pytest.mark.parametrize("host", ["192.0.2.1", "example.com", "127.1", "[::1]"])
def test_a_forged_address_is_not_connected_to(decode, host):
    status, answer, _ = decode.post(ASKED | {"kv_transfer_params": FETCH | {"remote_host": host}})
    assert (status, answer["error"]["code"]) == (403, "kv_transfer_foreign_peer")


@pytest.mark.parametrize(
    ("peers", "host", "port", "taken"),
    [
        (("10.0.0.7",), "10.0.0.7", 1, True),
        (("10.0.0.7:7600",), "10.0.0.7", 7600, True),
        (("10.0.0.7:7600",), "10.0.0.7", 7601, False),
        (("10.0.0.7",), "10.0.0.70", 7600, False),
        (("10.0.0.7",), "127.0.0.1", 7600, False),
        (("[fd00::7]:7600",), "fd00::7", 7600, True),
        ((), "127.0.0.1", 1, True),
    ],
)
def test_only_peers_may_be_named(peers, host, port, taken):
    params = KvTransferParams(**FETCH | {"remote_host": host, "remote_port": port})
    one = settings(role="decode", peers=peers)
    if taken:
        check_transfer(one, Headers(), params)
    else:
        with pytest.raises(RequestRefused, match="no peer of this server"):
            check_transfer(one, Headers(), params)


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
@pytest.mark.parametrize("given", [None, "", "wrong", SECRET + "x", "sécret"])
def test_with_a_secret_only_the_router_may_send_them(role, given):
    one = settings(role=role, router_secret=SECRET.replace(" ", "-"))
    fetch = FETCH | {"remote_host": "127.0.0.1"}
    params = KvTransferParams(**({"do_remote_decode": True} if role == "prefill" else fetch))
    headers = {} if given is None else {ROUTER_SECRET_HEADER: given}
    raw = Headers(raw=[(name.encode(), value.encode("latin-1")) for name, value in headers.items()])
    with pytest.raises(RequestRefused, match="only this server's router") as refused:
        check_transfer(one, raw, params)
    assert refused.value.status == 403
    check_transfer(one, Headers({ROUTER_SECRET_HEADER: SECRET.replace(" ", "-")}), params)


def test_role_both_needs_a_secret_and_shows_none():
    with pytest.raises(ConfigurationError, match="KVCONNECT_ROUTER_SECRET"):
        settings(role="both")
    with pytest.raises(ConfigurationError, match="printable ASCII") as refused:
        settings(role="both", router_secret=SECRET)
    assert SECRET not in str(refused.value)
    assert "secret-of-it" not in repr(settings(role="both", router_secret="secret-of-it"))


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"do_remote_decode": True, "do_remote_prefill": True}, "give one of them"),
        ({"do_remote_prefill": True}, "transfer_id"),
        (FETCH, "remote_host"),
        (FETCH | {"remote_host": "x", "remote_port": 0}, "remote_port"),
        (FETCH | {"remote_host": "x", "remote_block_ids": [1]}, "remote_block_ids"),
        ({"do": "prefill"}, "do_remote_prefill|do_remote_decode"),
        ("do_remote_decode", "kv_transfer_params"),
        ({"do_remote_decode": True, "transfer_id": "x" * 201}, "transfer_id"),
    ],
)
def test_what_is_wrong_with_them_is_named(params, named):
    with pytest.raises(ConfigurationError, match=named):
        CompletionRequest.parse({"prompt": "x", "kv_transfer_params": params})


def test_vllms_form_of_the_field_is_taken():
    empty = dict.fromkeys(
        ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"), None
    )
    given = {"do_remote_decode": True, "do_remote_prefill": False} | empty
    request = CompletionRequest.parse({"prompt": "x", "kv_transfer_params": given})
    assert request.hands_out
    with pytest.raises(ConfigurationError, match="stream"):
        CompletionRequest.parse({"prompt": "x", "stream": True, "kv_transfer_params": given})
