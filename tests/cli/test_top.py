"""top: the numbers of a server or a store in a terminal, as text and as JSON."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO

import pytest
from rich.console import Console
from stored_blocks import chain, fill

from kvconnect.cli.main import main
from kvconnect.cli.top_view import view
from kvconnect.prometheus import serve
from kvconnect.prometheus.overview import Overview, StoreNumbers
from kvconnect.trace import count

DEADLINE_S = 60.0
METRICS = b'kvconnect_requests_total{engine="e"} 3.0\n'


@pytest.fixture
def url(tmp_path) -> str:
    url = f"disk:{tmp_path}/kv?capacity=64MiB"
    fill(url, chain("a", 3))
    return url


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The metrics of this process."""
    count(
        "engine.request",
        prompt_tokens=100,
        reused_tokens=60,
        evicted_tokens=30,
        new_tokens=10,
        device_tokens=60,
        ceiling_tokens=90,
    )
    with serve(0) as scraped:
        yield f"http://127.0.0.1:{scraped.port}"


@pytest.fixture
def answering() -> Iterator[tuple[str, list[object]]]:
    """A server, and the status, the content and the keys that it was sent."""
    said: list[object] = [200, b"", []]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            said[2].append((self.path, self.headers["Authorization"]))
            self.send_response(said[0])
            self.end_headers()
            self.wfile.write(said[1])

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as one:
        threading.Thread(target=one.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{one.server_port}", said
        one.shutdown()


def shown(*parts) -> str:
    """What a wide terminal shows of a view."""
    console = Console(file=StringIO(), width=160, force_terminal=True, color_system=None)
    console.print(view(*parts))
    return console.file.getvalue()


def line_of(text: str, word: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if word in line)
    return line.split()


# ------------------------------------------------------------------------------------ JSON


def test_json_of_a_server_is_its_metrics(kvconnect, server):
    code, out, err = kvconnect("top", server, "--once", "--json")
    assert (code, err) == (0, "")
    told, now = json.loads(out), Overview.now().as_json()
    assert told | {"at": 0} == now | {"at": 0}
    assert told["prompt_tokens"] >= 100


def test_a_servers_url_may_end_in_what_is_under_it(kvconnect, answering):
    server, said = answering
    said[1] = METRICS
    for end in ("/", "/metrics", "/v1", "/metrics/"):
        assert kvconnect("top", server + end, "--once", "--json")[0] == 0
    assert {path for path, _ in said[2]} == {"/metrics"}


def test_json_of_a_store_is_what_stats_says(kvconnect, url):
    told = json.loads(kvconnect("top", url, "--once", "--json")[1])
    stats = json.loads(kvconnect("stats", url, "--json")[1])["store"]
    (store,) = told["stores"]
    assert (store["blocks"], store["used_bytes"]) == (3, stats["bytes"])
    assert (store["capacity_bytes"], store["pinned_bytes"]) == (64 << 20, 0)
    assert (told["engine"], told["prompt_tokens"], store["loads"]) == (None, 0, None)


def test_tiers_of_a_store_are_apart(kvconnect, tmp_path, url):
    near = f"disk:{tmp_path}/near"
    fill(near, chain("b", 1))
    told = json.loads(kvconnect("top", f"tiered:?tiers={near},{url}", "--once", "--json")[1])
    assert [one["blocks"] for one in told["stores"]] == [1, 3]


# ------------------------------------------------------------------------------------ errors


def test_a_server_that_cannot_be_reached_is_exit_code_4(kvconnect, closed_port):
    code, _, err = kvconnect("top", f"http://127.0.0.1:{closed_port}", "--once")
    assert (code, str(closed_port) in err) == (4, True)


@pytest.mark.parametrize(
    ("status", "content", "code", "message"),
    [
        (401, b"{}", 2, "needs another key"),
        (404, b"", 2, "has no /metrics"),
        (500, b"", 4, "answers with status 500"),
        (200, b"# nothing\n", 2, "answers without metrics of kvconnect"),
        (200, b"vllm_requests_total 3\n", 2, "answers without metrics of kvconnect"),
        (200, b"<html>", 4, "127.0.0.1"),
        (200, b"\xff\xfe", 4, "127.0.0.1"),
    ],
)
def test_an_answer_that_is_none_of_metrics(kvconnect, answering, status, content, code, message):
    server, said = answering
    said[:2] = status, content
    found, out, err = kvconnect("top", server, "--once", "--json")
    assert (found, out) == (code, "")
    assert message in json.loads(err)["error"]["message"]


def test_the_key_comes_from_the_option_or_the_environment(kvconnect, answering, monkeypatch):
    server, said = answering
    said[1] = METRICS
    assert kvconnect("top", server, "--once", "--json", "--api-key", "k")[0] == 0
    monkeypatch.setenv("KVCONNECT_API_KEY", "from-there")
    assert kvconnect("top", server, "--once", "--json")[0] == 0
    assert said[2] == [("/metrics", "Bearer k"), ("/metrics", "Bearer from-there")]


@pytest.mark.parametrize(
    ("module", "more"),
    [("rich", ()), ("rich.console", ()), ("prometheus_client.parser", ("--json",))],
)
def test_a_missing_package_names_the_extra(kvconnect, server, monkeypatch, module, more):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "kvconnect.cli.top_view")
    code, _, err = kvconnect("top", server, "--once", *more)
    assert code == 2
    assert "needs the extra 'top'" in err


@pytest.mark.parametrize("url", ["http://", "https://:80", "http://h:x", "http://h:99999999"])
def test_what_is_no_url_of_a_server(kvconnect, url):
    code, _, err = kvconnect("top", url, "--once")
    assert (code, "is no URL" in err) == (2, True)


# ------------------------------------------------------------------------------------ the view


def server_numbers(**fields) -> Overview:
    return Overview(
        at=1000.0,
        engine="kvconnect",
        **{
            "requests": 4,
            "prompt_tokens": 1000,
            "reused_tokens": 600,
            "ceiling_tokens": 900.0,
            "lost_tokens": 300,
            "outcomes": {"reused": 600, "new": 100, "evicted": 300, "late": 0},
            "hit_tokens": {"device": 400, "host": 0, "store": 200},
            "device_blocks": {"used": 3, "free": 7},
            "live_requests": {"running": 2, "waiting": 0},
            "stores": [StoreNumbers("DiskBackend", "disk:///kv", loaded_bytes=1 << 20, loads=2)],
        }
        | fields,
    )


def test_the_numbers_of_a_server():
    text = shown("http://host", server_numbers(), None)
    counts = "60.0 % 90.0 % 1,000 600 300 4"
    assert line_of(text, "since its start")[3:] == counts.split()
    assert line_of(text, "evicted")[1:4] == ["300", "30.0", "%"]
    assert "late" not in text
    assert "running: 2 running" in text
    assert line_of(text, "device") == ["device", "3", "blocks", "10", "blocks", "400"]
    assert line_of(text, "disk:///kv")[:6] == ["Disk", "disk:///kv", "-", "-", "1", "MiB"]


def test_rates_are_those_between_two_looks():
    stores = [StoreNumbers("DiskBackend", "disk:///kv", loaded_bytes=5 << 20)]
    fields = {"prompt_tokens": 1100, "reused_tokens": 650, "ceiling_tokens": 1000.0}
    later = server_numbers(stores=stores, **fields)
    later.at = 1004.0
    text = shown("http://host", later, server_numbers())
    assert line_of(text, "last 4 s")[3:] == ["50.0", "%", "100.0", "%", "100", "50", "0", "0"]
    assert "1 MiB/s" in text


def test_a_server_that_was_restarted_has_no_negative_rates():
    text = shown("http://host", Overview(at=1004.0, engine="kvconnect"), server_numbers())
    assert not re.search(r"-\d", text)


def test_what_a_server_says_does_not_steer_the_terminal():
    hostile = "\x1b]0;owned\x07[bold red]x[/]\x9b2J"
    stores = [StoreNumbers(hostile, hostile)]
    numbers = server_numbers(stores=stores, outcomes={hostile: 1000}, live_requests={hostile: 1})
    numbers.engine = hostile
    text = shown(hostile, numbers, None, hostile)
    assert not {"\x1b", "\x07", "\x9b"} & set(text)
    assert text.count("[bold red]x[/]") >= 5


def test_a_look_that_fails_is_said_beside_the_last_numbers():
    text = shown("http://host", server_numbers(), server_numbers(), "http://host: refused")
    assert "http://host: refused" in text
    assert "1,000" in text


def test_what_is_no_terminal_gets_the_numbers_once(kvconnect, url):
    code, out, _ = kvconnect("top", url)
    assert code == 0
    assert line_of(out, "Disk")[0] == "Disk"


def test_a_password_is_not_shown(kvconnect, closed_port):
    for url in (f"http://u:sesame@127.0.0.1:{closed_port}", "https://u:sesame@h:x"):
        _, out, err = kvconnect("top", url, "--once")
        assert "sesame" not in out + err


# ------------------------------------------------------------------------------------ a terminal


def test_in_a_terminal_it_looks_again_and_again_until_ctrl_c(answering):
    server, said = answering
    said[1] = METRICS
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "kvconnect", "top", server, "--interval", "50ms"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "150", "LINES": "50"}
    process = subprocess.Popen(
        command,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment,
        start_new_session=True,
    )
    os.close(follower)
    seen = b""
    try:
        end = time.monotonic() + DEADLINE_S

        def read_until(wanted: bytes) -> None:
            nonlocal seen
            while wanted not in seen:
                ready, _, _ = select.select([leader], [], [], max(0.0, end - time.monotonic()))
                assert ready, seen
                seen += os.read(leader, 1 << 16)

        read_until(b"since its start")
        seen = b""
        read_until(b"last ")
        said[1] += b'kvconnect_prompt_tokens_total{engine="e",outcome="new"} 123456789\n'
        read_until(b"123,45")
        process.send_signal(2)
        assert process.wait(DEADLINE_S) == 130
    finally:
        process.kill()
        process.wait()
        os.close(leader)


def test_the_help_names_what_it_shows(capsys):
    with pytest.raises(SystemExit):
        main(["top", "--help"])
    assert "hit rate and ceiling" in capsys.readouterr().out
