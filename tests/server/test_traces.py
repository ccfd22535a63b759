"""Traces of servers and routers: spans over HTTP, under the trace that a client names."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import server_child
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from server_fleet import started
from server_process import running

from kvconnect.cli.main import main

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
PROMPT = "A prompt that no span may hold. " * 4
ASKED = {"prompt": PROMPT, "max_tokens": 3, "cache_salt": "salt-of-nobody", "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 3, "ignore_eos": True}


class Collector(ThreadingHTTPServer):
    """An OTLP collector: keeps the spans that it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[object] = []
        self.services: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        sent = ExportTraceServiceRequest()
        sent.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
        for resource in sent.resource_spans:
            told = {one.key: one.value.string_value for one in resource.resource.attributes}
            self.server.services.add(told["service.name"])
            self.server.spans += [one for scope in resource.scope_spans for one in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as one:
        thread = threading.Thread(target=one.serve_forever, args=(0.01,))
        thread.start()
        yield one
        one.shutdown()
        thread.join()


def test_a_server_makes_a_span_of_each_request(model: Path, tmp_path: Path):
    output = tmp_path / "output"
    options = ("--store", "memory:", "--lookup-timeout", "60s", "--traces", "env")
    with running(model, output, *options, serve=server_child.serve_with_spans) as server:
        assert server.post(ASKED, headers=HEADERS)[0] == 200
        server.events(CHAT | {"stream": True}, "/v1/chat/completions")
        assert server.post(ASKED | {"prompt": [PROMPT, PROMPT]})[0] == 200
        assert server.post(ASKED | {"max_tokens": "no"})[0] == 400
        assert server.stop() == 0
    text = output.with_suffix(".spans").read_text()
    assert "no span may hold" not in text
    assert "salt-of" not in text
    spans = json.loads(text)
    requests = [one for one in spans if one["name"] == "kvconnect.request"]
    assert len(requests) == 4
    assert requests[0]["context"]["trace_id"] == f"0x{TRACE}"
    assert requests[0]["parent_id"] == f"0x{PARENT}"
    assert [one["parent_id"] for one in requests[1:]] == [None] * 3
    assert {one["attributes"]["gen_ai.request.model"] for one in requests} == {"tiny"}
    assert {one["attributes"]["gen_ai.usage.output_tokens"] for one in requests} == {3}
    for request in requests:
        own = {one["name"] for one in spans if one["parent_id"] == request["context"]["span_id"]}
        assert {"queue", "load", "prefill", "decode", "save"} >= own
        assert own >= {"queue", "prefill", "decode"}


def test_both_servers_of_a_router_belong_to_the_clients_trace(
    model: Path, tmp_path: Path, collector: Collector
):
    """Of a router without spans of its own: test_route_retries."""
    traced = ("--traces", collector.url)
    with (
        started(model, tmp_path, 1, 1, *traced) as servers,
        running(None, tmp_path / "router", *servers.urls(), *traced) as router,
    ):
        assert router.post(ASKED, headers=HEADERS)[0] == 200
        for one in (router, *servers.prefill, *servers.decode):
            assert one.stop() == 0
    assert {one.trace_id.hex() for one in collector.spans} == {TRACE}
    routed = [one for one in collector.spans if one.name == "kvconnect.route"]
    requests = [one for one in collector.spans if one.name == "kvconnect.request"]
    assert [one.parent_span_id.hex() for one in routed] == [PARENT]
    assert [one.parent_span_id for one in requests] == [routed[0].span_id] * 2
    assert {one.trace_state for one in requests} == {"vendor=1"}
    assert collector.services == {"kvconnect"}


@pytest.mark.parametrize("command", ["serve", "route"])
def test_without_the_packages_a_sentence_names_the_extra(command, model: Path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "kvconnect.otel", raising=False)
    given = [str(model)] if command == "serve" else ["--decode", "http://127.0.0.1:1"]
    assert main([command, *given, "--port", "0", "--traces", "env"]) == 2
    told = capsys.readouterr().err
    assert "--traces needs the extra 'otel': pip install '.[otel]'" in told


@pytest.mark.parametrize("url", ["localhost:4318", "grpc://collector:4317", "http://", "yes"])
def test_a_collector_is_a_url(url: str, model: Path, capsys):
    assert main(["serve", str(model), "--port", "0", "--traces", url]) == 2
    assert "give a collector's URL, as http://127.0.0.1:4318, or env" in capsys.readouterr().err
