"""Whose kv_transfer_params a server takes, and what it makes of them."""

from __future__ import annotations

import socket

import pytest
from starlette.datastructures import Headers

from kvconnect.cli.main import main
from kvconnect.errors import ConfigurationError
from kvconnect.server.errors import RequestRefused
from kvconnect.server.openai.completion import CompletionRequest
from kvconnect.server.openai.kv_transfer import KvTransferParams
from kvconnect.server.settings import ServerSettings
from kvconnect.server.trust import ROUTER_SECRET_HEADER, check_transfer

SECRET = "of the router and its servers"
FETCH = {"do_remote_prefill": True, "transfer_id": "one", "remote_port": 7600}


def settings(**fields: object) -> ServerSettings:
    return ServerSettings(model_names=("tiny",), **fields)


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


@pytest.mark.parametrize(
    ("role", "params", "kind", "message"),
    [
        (None, {"do_remote_decode": True}, RequestRefused, "started without --role"),
        (None, FETCH | {"remote_host": "127.0.0.1"}, RequestRefused, "started without --role"),
        (None, {}, RequestRefused, "started without --role"),
        ("prefill", FETCH | {"remote_host": "127.0.0.1"}, ConfigurationError, "has role 'prefill'"),
        ("decode", {"do_remote_decode": True}, ConfigurationError, "has role 'decode'"),
        *(
            ("decode", FETCH | {"remote_host": host}, RequestRefused, "no peer of this server")
            for host in ("192.0.2.1", "example.com", "127.1", "[::1]", "127.0.0.1%x.example.com")
        ),
    ],
)
def test_a_role_does_only_its_own_part_for_peers_of_this_machine(role, params, kind, message):
    with pytest.raises(kind, match=message):
        check_transfer(settings(role=role), Headers(), KvTransferParams(**params))


def test_every_rank_of_a_peer_must_be_one() -> None:
    params = KvTransferParams(**FETCH | {"remote_host": "10.0.0.7", "tp_size": 2})
    assert params.addresses == ("10.0.0.7:7600", "10.0.0.7:7601")
    check_transfer(settings(role="decode", peers=("10.0.0.7",)), Headers(), params)
    both = ("10.0.0.7:7600", "10.0.0.7:7601")
    check_transfer(settings(role="decode", peers=both), Headers(), params)
    with pytest.raises(RequestRefused, match="no peer of this server"):
        check_transfer(settings(role="decode", peers=both[:1]), Headers(), params)


def test_the_number_of_ranks_travels_from_one_engine_to_the_other() -> None:
    result = {"transfer_id": "one", "address": "10.0.0.7:7600", "tokens": 31, "tp_size": 4}
    told = KvTransferParams.handed_out(result)
    assert KvTransferParams(**told).for_engine() == result
    assert KvTransferParams(do_remote_prefill=False, remote_engine_id="gone").for_engine() is None
    del result["tp_size"]
    assert KvTransferParams(**KvTransferParams.handed_out(result)).for_engine() == result


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


# ------------------------------------------------------------------------------ at the start


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "/no/model", "--role", "both"], "KVCONNECT_ROUTER_SECRET"),
        (["serve", "/no/model", "--peer", "a:b:c"], "peers"),
        (
            ["serve", "/no/model", "--role", "prefill", "--transfer-listen", "0.0.0.0:7600"],
            "needs a secret",
        ),
        (
            ["serve", "/no/model", "--role", "decode", "--peer", "127.0.0.1", "--peer", "10.0.0.7"],
            "--peer 10.0.0.7: is not on this machine; set KVCONNECT_TRANSFER_SECRET",
        ),
        (["route", "--decode", "localhost:8001"], "number 1 is no URL of a server"),
        (["route", "--decode", "http://a:0"], "number 1 is no URL of a server"),
        (["route", "--decode", "http://a:65536"], "Port out of range"),
        (["route", "--decode", "http://a", "--host", "0.0.0.0"], "set an API key"),
        (["route", "--decode", "http://a", "--max-requests", "0"], "max_requests"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(arguments, said, monkeypatch, capsys):
    for name in ("API_KEY", "ROUTER_SECRET", "TRANSFER_SECRET"):
        monkeypatch.delenv(f"KVCONNECT_{name}", raising=False)
    assert main([*arguments, "--port", "0"]) == 2
    assert said in capsys.readouterr().err


def test_a_port_that_is_taken_is_named_by_the_router(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["route", "--decode", "http://a", "--port", str(port)]) == 2
    assert f"port: {port} on '127.0.0.1' cannot be listened to" in capsys.readouterr().err
