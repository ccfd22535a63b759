"""Servers of other roles and transports than those before the router in `test_route`."""

from __future__ import annotations

import os
import signal
import socket

import pytest
import server_child
from server_fleet import started
from server_process import request_bytes, running, wait_until

from kvconnect.errors import PeerRefused
from kvconnect.server.trust import ROUTER_SECRET_HEADER
from kvconnect.transfer.control.endpoint import Endpoint
from kvconnect.transfer.control.handshake import shake_hands
from kvconnect.transfer.control.wire import Wire

PROMPT = "A prompt goes to one server, and its answer comes from another one. " * 8
ASKED = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
TRUSTED = {ROUTER_SECRET_HEADER: server_child.ROUTER_SECRET}
OUT = {"kv_transfer_params": {"do_remote_decode": True}}


def test_prompts_move_over_nixl_as_over_tcp(model, server, tmp_path):
    with (
        started(model, tmp_path, 1, 1, "--transport", "nixl") as servers,
        running(None, tmp_path / "router", *servers.urls()) as router,
    ):
        num_tokens = 0
        for number in range(4):  # the first one after the prompt, the others layer by layer
            body = ASKED | {"prompt": f"{number} {PROMPT}", "stream": False}
            _, alone, _ = server.post(body)
            status, answer, _ = router.post(body)
            assert (status, answer["choices"]) == (200, alone["choices"])
            num_tokens += alone["usage"]["prompt_tokens"] - 1
        (decode,) = servers.decode
        fetched = decode.figure("kvconnect_transfer_tokens_total", outcome="fetched")
        assert fetched == num_tokens
        assert decode.figure("kvconnect_transfer_pull_failures_total") == 0
        wait_until(servers.idle, "nothing is left")
        assert [one.stop() for one in (*servers.decode, *servers.prefill)] == [0, 0]


def test_servers_of_one_user_share_a_secret_that_strangers_do_not_know(
    model, tmp_path, monkeypatch
):
    """None is given to them: the first makes one, in a file that the others find."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("KVCONNECT_TRANSFER_SECRET", raising=False)
    with started(model, tmp_path, 1, 1) as servers:
        (prefill,), (decode,) = servers.prefill, servers.decode
        _, handed, _ = prefill.post(ASKED | OUT)
        given = handed["kv_transfer_params"]
        status, _, _ = decode.post(ASKED | {"kv_transfer_params": given})
        assert status == 200
        assert decode.figure("kvconnect_transfer_tokens_total", outcome="fetched") > 0
        wire = Wire(
            socket.create_connection((given["remote_host"], given["remote_port"])),
            limit=4096,
            silence_s=60,
        )
        stranger = Endpoint(lambda: pytest.fail("it was asked who it is"), lambda *_: None)
        with pytest.raises(PeerRefused, match="secret: is set at the peer and not here"):
            shake_hands(wire, stranger, initiator=True)
        wire.close()


def test_a_server_of_both_roles_answers_all_requests_and_ends(model, server, tmp_path):
    serve = server_child.serve_with_router_secret
    with running(model, tmp_path / "both", "--role", "both", serve=serve) as both:
        status, answer, _ = both.post(ASKED)
        assert (status, answer["choices"]) == (200, server.post(ASKED)[1]["choices"])
        assert both.post(ASKED | OUT)[0] == 403
        status, handed, _ = both.post(ASKED | OUT, headers=TRUSTED)
        given = handed["kv_transfer_params"]
        assert (status, given["do_remote_prefill"]) == (200, True)
        status, again, _ = both.post(ASKED | {"kv_transfer_params": given}, headers=TRUSTED)
        assert (status, again["choices"]) == (200, answer["choices"])
        assert both.figure("kvconnect_requests_total") == 3
        assert both.figure("kvconnect_transfer_leases_total", event="offered") == 1
        with both.connect() as connection:
            body = ASKED | {"max_tokens": 100, "ignore_eos": True, "stream": True}
            connection.sendall(request_bytes(body))
            wait_until(lambda: both.live() == 1, "it runs")
            os.kill(both.pid, signal.SIGTERM)
            told = b""
            while piece := connection.recv(65536):
                told += piece
        assert b'"finish_reason":"length"' in told
        assert b"[DONE]" in told
        assert both.wait() == 0
