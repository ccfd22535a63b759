"""Spans of requests: their phases, what they say, and that nothing is noted without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from late_store import LateStore
from observed import patient, preempt
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from kvconnect import LLM, KvCacheConnectorConfig, LlmRequest, SamplingParams
from kvconnect.connector.io.save import SaveQueue
from kvconnect.engine.request.live_request import LiveRequest
from kvconnect.engine.thread import Inbox
from kvconnect.errors import ConfigurationError
from kvconnect.otel import trace_requests
from kvconnect.request import RequestState
from kvconnect.trace import Timeline, metrics

PROMPT = [7, 201] * 35
FOUR = SamplingParams(max_tokens=4, ignore_eos=True)
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


@pytest.fixture
def store() -> LateStore:
    return LateStore()


@pytest.fixture
def memory() -> Iterator[InMemorySpanExporter]:
    """The spans of all requests that are made in this test."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    stop = trace_requests(provider, model="tiny")
    yield exporter
    stop()
    assert not metrics.traces


def spans_of(memory: InMemorySpanExporter) -> tuple[list[ReadableSpan], list[ReadableSpan]]:
    """Those of requests, and those of phases by their beginning."""
    spans = memory.get_finished_spans()
    requests = [span for span in spans if span.name == "kvconnect.request"]
    phases = [span for span in spans if span.name != "kvconnect.request"]
    return requests, sorted(phases, key=lambda span: span.start_time)


def wait_for_saves(llm: LLM) -> None:
    while not llm.reset_prefix_cache():
        pass


def test_a_request_is_a_span_with_its_phases(
    open_llm: Callable[..., LLM], llama: Path, store: LateStore, memory: InMemorySpanExporter
):
    llm = open_llm(llama, connector=patient(store))
    llm.generate([PROMPT], FOUR, cache_salt="secret salt")
    wait_for_saves(llm)
    (request,), phases = spans_of(memory)
    assert [one.name for one in phases] == ["queue", "prefill", "decode", "save"]
    assert request.parent is None
    assert {one.parent.span_id for one in phases} == {request.context.span_id}
    assert phases[0].start_time == pytest.approx(request.start_time, abs=10**8)
    ends = [one.end_time for one in phases]
    assert [one.start_time for one in phases[1:]] == ends[:-1]
    assert phases[2].start_time <= request.end_time <= phases[3].end_time
    memory.clear()

    llm.generate([PROMPT], FOUR, cache_salt="secret salt", trace_headers=HEADERS)
    wait_for_saves(llm)
    (request,), phases = spans_of(memory)
    assert [one.name for one in phases][:4] == ["queue", "load", "prefill", "decode"]
    assert f"{request.context.trace_id:032x}" == TRACE
    assert f"{request.parent.span_id:016x}" == PARENT
    assert dict(request.attributes) == {
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": 70,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ("length",),
        "kvconnect.computed_tokens": 1,
        "kvconnect.reused_device_tokens": 0,
        "kvconnect.reused_host_tokens": 0,
        "kvconnect.reused_store_tokens": 69,
    }


def test_no_span_holds_text_tokens_or_salts(llm: LLM, memory: InMemorySpanExporter):
    llm.generate("a very private prompt", FOUR, cache_salt="secret salt")
    spans = memory.get_finished_spans()
    told = "".join(span.to_json() for span in spans)
    assert "private" not in told
    assert "secret" not in told
    given = [value for span in spans for value in span.attributes.values()]
    assert {type(value) for value in given} == {int, str, tuple}
    assert {value for value in given if not isinstance(value, int)} == {"tiny", ("length",)}


def test_each_completion_is_a_span_of_the_callers_trace(llm: LLM, memory: InMemorySpanExporter):
    params = SamplingParams(max_tokens=2, n=3, temperature=1.0, ignore_eos=True)
    llm.generate([PROMPT], params, trace_headers=HEADERS | {"other": "x"})
    requests, _ = spans_of(memory)
    assert [f"{one.parent.span_id:016x}" for one in requests] == [PARENT] * 3


@pytest.mark.parametrize("wrong", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", "00-" * 2000])
def test_a_header_that_is_wrong_begins_a_trace(llm: LLM, memory, wrong: str):
    llm.generate([PROMPT], FOUR, trace_headers={"traceparent": wrong})
    ((request,), _) = spans_of(memory)
    assert request.parent is None


def test_a_trace_that_is_not_sampled_is_not_sampled_here(llm: LLM, memory):
    llm.generate([PROMPT], FOUR, trace_headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    assert memory.get_finished_spans() == ()


def test_headers_are_a_mapping(llm: LLM):
    with pytest.raises(ConfigurationError, match="trace_headers: 'traceparent' is no mapping"):
        llm.submit(PROMPT, FOUR, trace_headers="traceparent")


def test_a_preempted_request_queues_and_computes_again(llm: LLM, memory: InMemorySpanExporter):
    sent = preempt(llm, lambda one: one.num_generated_tokens == 3 and not sent)
    llm.generate([PROMPT], SamplingParams(max_tokens=20, ignore_eos=True))
    _, phases = spans_of(memory)
    assert [one.name for one in phases] == ["queue", "prefill", "decode"] * 2


@pytest.mark.parametrize("how", ["abort", "error"])
def test_the_reason_of_its_end_is_told(llm: LLM, memory, monkeypatch, how: str):
    if how == "error":

        def fails(*_: object) -> None:
            raise RuntimeError("a text with the prompt in it")

        monkeypatch.setattr(llm._engine, "_take", fails)
    handle = llm.submit(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True))
    if how == "abort":
        handle.abort()
        handle.result()
    else:
        with pytest.raises(RuntimeError):
            handle.result()
    ((request,), _) = spans_of(memory)
    assert request.attributes["gen_ai.response.finish_reasons"] == (how,)
    assert request.status.is_ok is (how == "abort")
    assert "prompt in it" not in request.to_json()


def test_a_request_whose_blocks_wait_when_the_engine_closes_has_a_span(
    open_llm: Callable[..., LLM], llama: Path, store: LateStore, memory, monkeypatch
):
    monkeypatch.setattr(SaveQueue, "stage", lambda *_, **__: 0)
    llm = open_llm(llama, connector=KvCacheConnectorConfig(backend=store))
    llm.generate([PROMPT], FOUR)
    assert memory.get_finished_spans() == ()
    llm.close()
    (_,), phases = spans_of(memory)
    assert phases[-1].name == "save"


# ---------------------------------------------------------------------- without traces


def test_nothing_is_noted_without_a_hook_for_traces(llm: LLM, monkeypatch):
    made = []
    post = Inbox.post

    def noted(box, message):
        made.extend([message.request] if isinstance(message, LiveRequest) else [])
        post(box, message)

    monkeypatch.setattr(Inbox, "post", noted)
    llm.generate([PROMPT], FOUR)
    remove = metrics.add_hook(lambda event: None)
    llm.generate([PROMPT], FOUR)
    remove()
    stop = trace_requests(TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False))
    llm.generate([PROMPT], FOUR)
    stop()
    stop()  # once more does nothing
    llm.generate([PROMPT], FOUR)
    assert [type(one) is LlmRequest for one in made] == [True, True, False, True]


def test_a_timeline_is_bounded_and_in_order():
    timeline = Timeline({})
    for _ in range(100):
        timeline.enter("queue")
        timeline.enter("queue")
        timeline.enter("prefill")
    timeline.enter(None)
    timeline.end("stop")
    timeline.end("abort")
    assert len(timeline.phases) == 64
    assert timeline.reason == "stop"
    assert [one.name for one in timeline.phases[:3]] == ["queue", "prefill", "queue"]
    assert RequestState.QUEUED.value == "queued"
