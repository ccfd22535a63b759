"""A server's beginning and end: settings that are refused, signals, kills, restarts."""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import threading
from pathlib import Path

import openai
import pytest
import server_child
from server_process import request_bytes, running, wait_until

import kvconnect.server
from kvconnect.cli.main import main
from kvconnect.errors import ConfigurationError
from kvconnect.server.http.http_server import _room_for
from kvconnect.server.http.listener import Listener
from kvconnect.server.settings import ServerSettings

PROMPT = "A system prompt that every restart of the server should find again. " * 4
ASKED = {"model": "tiny", "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
LONG = {"prompt": "a long answer", "max_tokens": 4000, "ignore_eos": True}


def settings(**fields: object) -> ServerSettings:
    return ServerSettings(**({"model_names": ("tiny",), "port": 0} | fields))


# ------------------------------------------------------------------------------------ where


@pytest.mark.parametrize(
    ("host", "message"),
    [
        *((host, "set an API key") for host in ("0.0.0.0", "::", "192.0.2.1")),
        ("no.such.invalid", r"host: 'no\.such\.invalid' cannot be resolved"),
    ],
)
def test_a_host_that_is_unknown_or_beyond_loopback_without_a_key_is_refused(host, message):
    with pytest.raises(ConfigurationError, match=message):
        Listener.bind(settings(host=host))


@pytest.mark.parametrize(
    ("host", "key"),
    [("127.0.0.1", None), ("::1", None), ("localhost", None), ("0.0.0.0", "secret")],
)
def test_on_loopback_or_with_a_key_it_listens(host, key):
    listener = Listener.bind(settings(host=host, api_key=key))
    listener.listen()
    with socket.create_connection((host, listener.port)):
        pass
    listener.close()


@pytest.mark.parametrize("key", ["", "two words", "new\nline", "ä"])
def test_a_key_that_fits_no_header_is_refused_and_not_told(key):
    with pytest.raises(ConfigurationError, match="printable ASCII") as raised:
        settings(api_key=key)
    assert not key or key not in str(raised.value)


def test_a_key_is_in_no_repr():
    assert "secret" not in repr(settings(api_key="secret"))


@pytest.mark.parametrize("timeout_s", [0, 1e-4, 1e7, float("inf"), float("nan")])
def test_a_client_timeout_that_the_system_cannot_count_is_refused(timeout_s):
    with pytest.raises(ConfigurationError, match="client_timeout_s"):
        settings(client_timeout_s=timeout_s)


ENDLESS = resource.RLIM_INFINITY
ROUTER = (2 * 1024, 2)
"""The connections to servers of all its requests, and of one of them."""


@pytest.mark.parametrize(
    ("limits", "outgoing", "room", "raised"),
    [
        ((1024, 20_000), (), 4096, [(4352, 20_000)]),
        ((1024, 2000), (), 1744, [(2000, 2000)]),
        ((100, 100), (), 1, [(100, 100)]),
        ((20_000, 20_000), (), 4096, []),
        ((1024, ENDLESS), (), 4096, [(4352, ENDLESS)]),
        ((ENDLESS, ENDLESS), (), 4096, []),
        ((1024, 20_000), ROUTER, 4096, [(6400, 20_000)]),
        ((1024, 4096), ROUTER, 1792, [(4096, 4096)]),
        ((1024, 2000), ROUTER, 581, [(2000, 2000)]),
        ((ENDLESS, ENDLESS), ROUTER, 4096, []),
    ],
)
def test_connections_leave_descriptors_for_all_else(monkeypatch, limits, outgoing, room, raised):
    found = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: found.append(both))
    assert (_room_for(4096, *outgoing), found) == (room, raised)


def test_a_port_that_is_taken_is_named_before_the_model_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "/no/model", "--port", str(port)]) == 2
    assert f"port: {port} on '127.0.0.1' cannot be listened to" in capsys.readouterr().err


def test_a_key_may_come_from_the_environment(monkeypatch, capsys):
    arguments = ["serve", "/no/model", "--host", "0.0.0.0", "--port", "0"]
    monkeypatch.delenv("KVCONNECT_API_KEY", raising=False)
    assert main(arguments) == 2
    assert "set an API key (KVCONNECT_API_KEY or --api-key)" in capsys.readouterr().err
    monkeypatch.setenv("KVCONNECT_API_KEY", "secret")
    assert main(arguments) == 2
    assert "model: '/no/model'" in capsys.readouterr().err, "it went on to the model"


def test_two_that_bind_one_port_do_not_both_listen():
    first = Listener.bind(settings())
    second = Listener.bind(settings(port=first.port))
    first.listen()
    with pytest.raises(ConfigurationError, match="cannot be listened to"):
        second.listen()
    first.close()
    second.close()


# ------------------------------------------------------------------------------------ the end


def store(directory: Path) -> tuple[str, ...]:
    url = f"disk://{directory}?capacity=64MiB"
    return ("--store", url, "--lookup-timeout-ms", "60000", "--no-overlap-loads")


def test_a_killed_server_answers_from_the_store_after_its_restart(model: Path, tmp_path: Path):
    with running(model, tmp_path / "first", *store(tmp_path / "kv")) as server:
        with server.client() as client:
            before = client.completions.create(**ASKED)
        assert before.usage.prompt_tokens_details.cached_tokens == 0
        blocks = len(PROMPT) // 16
        wait_until(
            lambda: server.figure("kvconnect_store_blocks_total", operation="save") >= blocks,
            "the prompt is saved",
        )
        server.process.kill()
    with running(model, tmp_path / "second", *store(tmp_path / "kv")) as server:
        with server.client() as client:
            after = client.completions.create(**ASKED)
        assert after.choices[0].text == before.choices[0].text
        assert after.usage.prompt_tokens_details.cached_tokens == (len(PROMPT) - 1) // 16 * 16
        assert server.figure("kvconnect_hit_tokens_total", tier="store") == len(PROMPT) - 1
        assert server.stop() == 0


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_lets_what_runs_end_and_refuses_what_comes(
    model: Path, tmp_path: Path, number: signal.Signals
):
    with running(model, tmp_path / "output", *store(tmp_path / "kv")) as server:
        text = []

        def stream() -> None:
            with server.client() as client:
                chunks = client.completions.create(
                    stream=True, **ASKED | {"max_tokens": 600, "extra_body": {"ignore_eos": True}}
                )
                for chunk in chunks:
                    text.append(chunk.choices[0])  # noqa: PERF401  what came so far

        reader = threading.Thread(target=stream)
        reader.start()
        wait_until(lambda: text, "it streams")
        os.kill(server.pid, number)
        wait_until(lambda: server.post(b"", "/health", method="GET")[0] == 503, "it drains")
        status, answer, headers = server.post(ASKED)
        assert (status, answer["error"]["code"]) == (503, "shutting_down")
        assert headers["retry-after"]
        reader.join()
        assert text[-1].finish_reason == "length"
        assert server.wait() == 0
        assert server.said().count("kvconnect: ") == 1, "it told where it listens, and no more"
        assert "Traceback" not in server.said()


def test_what_runs_too_long_is_aborted(model: Path, tmp_path: Path):
    with (
        running(model, tmp_path / "output", "--shutdown-timeout", "0.2") as server,
        server.connect() as whole,
        server.connect() as stream,
        server.client() as client,
    ):
        whole.sendall(request_bytes(LONG))
        stream.sendall(request_bytes(LONG | {"stream": True}))
        wait_until(lambda: server.live() == 2, "they run")
        os.kill(server.pid, signal.SIGTERM)
        answers = [b"".join(iter(lambda one=one: one.recv(65536), b"")) for one in (whole, stream)]
        assert answers[0].startswith(b"HTTP/1.1 503 ")
        assert b"the server is shutting down" in answers[1]
        assert server.wait() == 0
        with pytest.raises(openai.APIConnectionError):
            client.models.list()


def test_bodies_that_did_not_come_end_at_the_first_signal_and_what_runs_at_the_second(
    model: Path, tmp_path: Path
):
    """The bodies hold nothing up, get a proper answer, and leave no traceback."""
    whole = request_bytes(ASKED)
    with (
        running(model, tmp_path / "output", "--shutdown-timeout", "600") as server,
        server.connect() as half,
        server.connect() as chunked,
        server.connect() as runs,
    ):
        half.sendall(whole[:-9])
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        chunked.sendall(head + b'Transfer-Encoding: chunked\r\n\r\n3\r\n{"a\r\n')
        runs.sendall(request_bytes(LONG))
        wait_until(lambda: server.live() == 1, "it runs, and the other heads came before")
        os.kill(server.pid, signal.SIGTERM)
        for one in (half, chunked):
            answer = b"".join(iter(lambda one=one: one.recv(65536), b""))
            assert answer.startswith(b"HTTP/1.1 503 "), answer
            assert b"the server is shutting down" in answer
        assert server.post(b"", "/health", method="GET")[0] == 503, "it drains"
        os.kill(server.pid, signal.SIGTERM)
        assert runs.recv(65536).startswith(b"HTTP/1.1 503 "), "it was not waited for"
        assert server.wait() == 0
        assert "Traceback" not in server.said()


def test_an_engine_that_fails_ends_the_server(model: Path, tmp_path: Path):
    with (
        running(model, tmp_path / "output", serve=server_child.serve_until_it_fails) as server,
        server.connect() as other,
    ):
        other.sendall(request_bytes(LONG))
        wait_until(lambda: server.live() == 1, "another request runs")
        status, answer, _ = server.post(ASKED | {"prompt": "x" * 77})
        assert (status, answer["error"]["message"]) == (500, "the request failed (RuntimeError)")
        assert other.recv(65536).startswith(b"HTTP/1.1 500 ")
        assert server.wait() == 1
        assert "the engine has failed: it takes no more requests" in server.said()


@pytest.mark.parametrize("name", ["uvicorn", "starlette"])
def test_a_missing_extra_is_named(monkeypatch, capsys, name):
    monkeypatch.setattr(kvconnect, "server", kvconnect.server)  # is another one meanwhile
    for module in list(sys.modules):
        if module.startswith(("kvconnect.server", f"{name}.")):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    assert main(["serve", "/no/model"]) == 2
    assert "pip install '.[serve]'" in capsys.readouterr().err
