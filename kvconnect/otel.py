"""Makes OpenTelemetry spans of requests, from the events of `kvconnect.trace`.

Needs the extra ``otel``; nothing imports it unless traces are wanted. Spans hold times, counts and
reasons: no text, no token, no salt.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import urlsplit

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvconnect.errors import ConfigurationError
from kvconnect.trace import Event, metrics, warn_once

__all__ = ["TraceExport", "trace_requests"]

_PROPAGATOR = TraceContextTextMapPropagator()
_PATH = "/v1/traces"
_CLOSE_S = 3.0
_LONGEST_HEADER = 512
"""W3C asks for at least so many characters of a ``tracestate``."""


def trace_requests(
    provider: otel.TracerProvider | None = None, *, model: str | None = None
) -> Callable[[], None]:
    """Makes a span of each request of this process's engines; returns how to stop that.

    The span ``kvconnect.request`` has a child for each phase: ``queue``, ``load``, ``prefill``,
    ``decode``, ``save``. All are made when the request is over, on the engine's thread, which takes
    some 0.2 ms. Requests that were made before this call have none.

    Args:
        provider: of the spans; ``None``: the global one of OpenTelemetry.
        model: their attribute ``gen_ai.request.model``.
    """
    tracer = otel.get_tracer("kvconnect", tracer_provider=provider)
    named = {} if model is None else {"gen_ai.request.model": model}

    def make(event: Event) -> None:
        if event.timeline is not None:
            _make_spans(tracer, event, named)

    return metrics.add_hook(make, traces=True)


def _make_spans(tracer: otel.Tracer, event: Event, named: Mapping[str, str]) -> None:
    timeline, values = event.timeline, event.values
    if timeline is None:
        return
    span = tracer.start_span(
        "kvconnect.request",
        _context_of(timeline.headers),
        SpanKind.INTERNAL,
        attributes={
            **named,
            "gen_ai.usage.input_tokens": int(values["prompt_tokens"]),
            "gen_ai.usage.output_tokens": int(values["output_tokens"]),
            "gen_ai.response.finish_reasons": [timeline.reason],
            **{
                f"kvconnect.{name}": int(value)
                for name, value in values.items()
                if name not in {"prompt_tokens", "output_tokens"}
            },
        },
        start_time=timeline.started_ns,
    )
    if span.is_recording():
        if timeline.reason == "error":
            span.set_status(Status(StatusCode.ERROR))
        below = otel.set_span_in_context(span)
        for phase in timeline.phases:
            child = tracer.start_span(phase.name, below, start_time=phase.start_ns)
            child.end(phase.end_ns)
    span.end(timeline.ended_ns)


def _context_of(headers: Mapping[str, str]) -> Context:
    """Returns the context that `headers` name; an empty one if they are wrong or too long."""
    found = {name: value for name, value in headers.items() if len(value) <= _LONGEST_HEADER}
    return _PROPAGATOR.extract(found, Context())


class TraceExport:
    """Sends spans over OTLP/HTTP, in the background. A collector that is gone costs spans only.

    Args:
        target: the URL of the collector, as ``http://127.0.0.1:4318``, or ``env``: what the
            variables ``OTEL_EXPORTER_OTLP_*`` say. All other ``OTEL_*`` variables count in any
            case: sampling, limits, and the name of the service, which is ``kvconnect`` without one.
        exporter: sends them instead.

    Attributes:
        provider: of the spans.

    Raises:
        ConfigurationError: `target` is no URL.
    """

    def __init__(self, target: str, exporter: SpanExporter | None = None) -> None:
        sends = exporter or OTLPSpanExporter(endpoint=_endpoint(target))
        resource = Resource.create()
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "kvconnect"}))
        self.provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self.provider.add_span_processor(BatchSpanProcessor(sends))
        self._tracer = self.provider.get_tracer("kvconnect")

    @contextmanager
    def routed(self, headers: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
        """Makes the span ``kvconnect.route``; yields the headers that put others below it.

        Args:
            headers: `TRACE_HEADERS` of the client.
        """
        context = _context_of(headers)
        span = self._tracer.start_span("kvconnect.route", context, SpanKind.SERVER)
        carried: dict[str, str] = {}
        _PROPAGATOR.inject(carried, otel.set_span_in_context(span, context))
        try:
            yield carried
        except Exception:
            span.set_status(Status(StatusCode.ERROR))
            raise
        finally:
            span.end()

    def close(self) -> None:
        """Sends what is left; blocks up to 3 s."""
        # Without a collector the SDK would take 30 s.
        ending = threading.Thread(
            target=self.provider.shutdown, name="kvconnect-traces-end", daemon=True
        )
        ending.start()
        ending.join(_CLOSE_S)
        if ending.is_alive():
            warn_once("traces.close", "traces: the last spans were not sent in time")


def _endpoint(target: str) -> str | None:
    if target == "env":
        return None
    parts = urlsplit(target)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigurationError(
            f"traces: '{parts.scheme}' is no way to send spans; give a collector's URL, as "
            "http://127.0.0.1:4318, or env"
        )
    return target if parts.path.strip("/") else target.rstrip("/") + _PATH
