"""``kvconnect bench serve``: against a server whose pace is known, and against our own."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

FIRST_S, NEXT_S = 0.03, 0.01
TOKENS = 5


class Paced(BaseHTTPRequestHandler):
    """Answers every request with the same tokens at the same pace."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.looked_at.append((self.path, len(self.server.asked)))
        self.send_error(404)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, asked, self.headers.get("Authorization")))
        if self.server.refuses:
            self.send_error(429)
            return
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        chat = "messages" in asked
        if chat:
            self._event(choices=[{"delta": {"role": "assistant", "content": ""}}])
        for number in range(TOKENS):
            time.sleep(NEXT_S if number else FIRST_S)
            piece = {"delta": {"content": "x"}} if chat else {"text": "x"}
            self._event(choices=[piece])
        usage = {
            "prompt_tokens": 40,
            "completion_tokens": TOKENS,
            "prompt_tokens_details": {"cached_tokens": 30},
        }
        if self.server.counts:
            self._event(choices=[], usage=usage)
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, **content: object) -> None:
        self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def paced() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Paced) as server:
        server.asked, server.looked_at, server.refuses, server.counts = [], [], False, True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def measured(bench, paced):
    def run(*arguments: object) -> dict[str, float]:
        url = f"http://127.0.0.1:{paced.server_port}"
        found, _ = bench("serve", "--url", url, "--served-model-name", "m", *arguments)
        return {name: figure["value"] for name, figure in found.items()}

    return run


def test_the_pace_of_a_server_is_what_is_told(measured):
    found = measured("--requests", 8, "--concurrency", 4)
    assert found["requests"] == 8
    assert found["hit rate: cached of them"] == 75
    assert found["time to first token, p50"] >= 1000 * FIRST_S
    whole = FIRST_S + (TOKENS - 1) * NEXT_S
    # A busy machine may read the first token late, and those after it in a bunch.
    latencies = ("time to first token, mean", 1), ("inter-token latency, mean", TOKENS - 1)
    assert sum(found[name] * count for name, count in latencies) >= 1000 * whole
    # Two rounds of four at once.
    assert found["duration"] >= 2 * whole
    assert found["output tokens per second"] == pytest.approx(8 * TOKENS / found["duration"])


def test_what_a_clients_first_request_loads_is_not_measured(measured, paced):
    """It takes another request before; whatever comes of that."""
    measured("--requests", 1)
    assert paced.looked_at == [("/v1/models", 0)]


def test_requests_share_prefixes_and_nothing_else(measured, paced):
    measured("--requests", 6, "--prefixes", 2, "--prefix-tokens", 50, "--suffix-tokens", 20)
    prompts = [asked["prompt"] for _, asked, _ in paced.asked]
    assert {len(prompt) for prompt in prompts} == {70}
    assert len({prompt[:50] for prompt in prompts}) == 2
    assert len({prompt[50:] for prompt in prompts}) == 6


def test_prompts_are_written_as_they_are_asked(measured, paced, tmp_path):
    file = tmp_path / "prompts.jsonl"
    measured("--requests", 3, "--concurrency", 1, "--seed", 5, "--write-prompts", file)
    written = [json.loads(line) for line in file.read_text().splitlines()]
    assert written == [{"prompt": asked["prompt"]} for _, asked, _ in paced.asked]


def test_each_turn_of_a_chat_has_all_before_it(measured, paced, monkeypatch):
    monkeypatch.setenv("KVCONNECT_API_KEY", "secret")
    found = measured("--workload", "chats", "--chats", 2, "--turns", 3, "--concurrency", 1)
    assert found["requests"] == 6
    assert {(path, key) for path, _, key in paced.asked} == {
        ("/v1/chat/completions", "Bearer secret")
    }
    first, second, third = [asked["messages"] for _, asked, _ in paced.asked[:3]]
    assert [one["role"] for one in first] == ["system", "user"]
    assert second[:2] == first
    assert second[2] == {"role": "assistant", "content": "x" * TOKENS}
    assert third[:4] == second


def test_a_server_that_counts_no_tokens_is_measured_too(measured, paced):
    paced.counts = False
    found = measured("--requests", 1, "--concurrency", 1)
    assert found["hit rate: cached of them"] == 0
    assert found["time to first token, p50"] >= 1000 * FIRST_S


def test_an_error_of_the_server_is_told(kvconnect, paced):
    paced.refuses = True
    url = f"http://127.0.0.1:{paced.server_port}"
    code, _, err = kvconnect("bench", "serve", "--url", url, "--served-model-name", "m")
    assert code == 1
    assert "/v1/completions: status 429" in err


@pytest.mark.slow
def test_a_server_of_its_own_is_measured(bench, model: Path, tmp_path: Path):
    arguments = ("--requests", 8, "--prefixes", 2, "--prefix-tokens", 64, "--suffix-tokens", 8)
    store = ("--store", f"disk://{tmp_path}/kv?capacity=64MiB")
    found, _ = bench("serve", "--model", model, *arguments, *store, "--max-tokens", 4)
    assert found["requests"]["value"] == 8
    assert found["prompt tokens"]["value"] == 8 * 72
    assert found["hit rate: cached of them"]["value"] > 0
