"""The export of spans: where to, under which name, and that its end is bounded."""

from __future__ import annotations

import threading

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvconnect import otel
from kvconnect.errors import ConfigurationError

HEADERS = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


@pytest.mark.parametrize(
    ("target", "endpoint"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("http://collector:9/own/path", "http://collector:9/own/path"),
        ("env", None),
    ],
)
def test_a_collector_without_a_path_has_the_standard_one(target, endpoint):
    assert otel._endpoint(target) == endpoint


@pytest.mark.parametrize("target", ["", "127.0.0.1:4318", "file:///tmp/spans", "http://", "ENV"])
def test_another_kind_of_target_is_refused(target):
    with pytest.raises(ConfigurationError, match="give a collector's URL"):
        otel.TraceExport(target)


@pytest.mark.parametrize(("given", "name"), [(None, "kvconnect"), ("mine", "mine")])
def test_the_service_is_named_by_the_standard_variable(monkeypatch, given, name):
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    if given is not None:
        monkeypatch.setenv("OTEL_SERVICE_NAME", given)
    memory = InMemorySpanExporter()
    export = otel.TraceExport("env", memory)
    with export.routed({}):
        pass
    export.close()
    (span,) = memory.get_finished_spans()
    assert span.resource.attributes["service.name"] == name


def test_what_is_routed_is_below_its_client_and_above_its_servers():
    memory = InMemorySpanExporter()
    export = otel.TraceExport("env", memory)
    with export.routed(HEADERS) as carried:
        version, trace, span_id, flags = carried["traceparent"].split("-")
    with pytest.raises(RuntimeError), export.routed({}):
        raise RuntimeError("a text of a prompt")
    export.close()
    routed, failed = memory.get_finished_spans()
    assert (version, flags) == ("00", "01")
    assert trace == f"{routed.context.trace_id:032x}" == HEADERS["traceparent"].split("-")[1]
    assert span_id == f"{routed.context.span_id:016x}"
    assert (routed.status.is_ok, failed.status.is_ok) == (True, False)
    assert "a text of a prompt" not in failed.to_json()


def test_a_collector_that_never_answers_does_not_keep_a_server_from_ending(monkeypatch, caplog):
    released = threading.Event()

    class Stuck(SpanExporter):
        def export(self, spans):
            released.wait(60)
            return SpanExportResult.FAILURE

        def shutdown(self):
            """Has nothing to end."""

    monkeypatch.setattr(otel, "_CLOSE_S", 0.05)
    export = otel.TraceExport("env", Stuck())
    with export.routed({}):
        pass
    export.close()
    assert "the last spans were not sent in time" in caplog.text
    released.set()
    for thread in threading.enumerate():
        if thread.name == "kvconnect-traces-end":
            thread.join(60)
