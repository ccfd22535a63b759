"""Histograms of what clients wait for: whole answers and streams alike, and who is left out."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from kvconnect import trace as trace_module
from kvconnect.server import endpoint as times_module
from kvconnect.server.endpoint import TokenTimes
from kvconnect.trace import TIMES, Metrics

MODEL = (("model", "tiny"),)


@pytest.fixture
def now(monkeypatch):
    """The clock: a list of one time."""
    clock = [100.0]
    monkeypatch.setattr(times_module.time, "perf_counter", lambda: clock[0])
    return clock


@pytest.fixture
def metrics(monkeypatch) -> Metrics:
    fresh = Metrics()
    monkeypatch.setattr(trace_module, "metrics", fresh)
    monkeypatch.setattr(times_module, "metrics", fresh)
    return fresh


def output(*lengths, ttft_ms=200.0, reason="length"):
    completions = [
        SimpleNamespace(index=index, token_ids=(1,) * length)
        for index, length in enumerate(lengths)
    ]
    return SimpleNamespace(ttft_ms=ttft_ms, outputs=completions, finish_reason=reason)


class Handle:
    submitted_at = 100.0

    def __init__(self, result, clock=None, at=0.0):
        self._result, self._clock, self._at = result, clock, at

    def __await__(self):
        if self._clock is not None:
            self._clock[0] = self._at
        yield from asyncio.sleep(0).__await__()
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


def test_a_whole_answer_counts_both(metrics, now):
    times = TokenTimes("tiny", 1)
    asyncio.run(times.timed(Handle(output(5), now, 101.0)))
    counters = metrics.by_labels()[MODEL]
    assert counters["server.first_token.seconds"] == pytest.approx(0.2)
    assert counters["server.between_tokens.seconds"] == pytest.approx(0.8 / 4)
    buckets = metrics.histograms()[MODEL]["server.between_tokens.seconds"]
    assert buckets[TIMES.index(0.25)] == sum(buckets) == 1


def test_a_stream_ends_with_its_last_tokens(metrics, now):
    """And not with its slowest sibling: each choice has a time of its own."""
    times = TokenTimes("tiny", 2)
    for at, index in ((100.2, 0), (100.6, 1), (100.8, 2), (101.2, 3), (102.2, 3)):
        now[0] = at
        times.arrived(index)
    now[0] = 500.0
    asyncio.run(times.count_streamed([Handle(output(1, 3)), Handle(output(4, 3, ttft_ms=600.0))]))
    counters = metrics.by_labels()[MODEL]
    assert counters["server.first_token"] == 2
    expected = [0.4 / 2, 0.2 / 3, 1.6 / 2]  # the first has one token, and so nothing between
    assert counters["server.between_tokens"] == len(expected)
    assert counters["server.between_tokens.seconds"] == pytest.approx(sum(expected))


@pytest.mark.parametrize(
    "one", [output(3, reason="abort"), output(0, ttft_ms=None), RuntimeError("planted")]
)
def test_what_fails_is_aborted_or_answers_nothing_is_not_counted(metrics, now, one):
    times = TokenTimes("tiny", 1)
    if isinstance(one, Exception):
        with pytest.raises(RuntimeError, match="planted"):
            asyncio.run(times.timed(Handle(one)))
    else:
        asyncio.run(times.timed(Handle(one)))
    assert metrics.num_events == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_tells_them(client, server, stream):
    def counted(name):
        return server.figure(f"kvconnect_{name}_seconds_count", model="tiny")

    before = [counted(name) for name in ("first_token", "between_tokens")]
    answer = client.completions.create(
        model="tiny",
        prompt=["one prompt", "and another"],
        max_tokens=4,
        n=1,
        stream=stream,
        extra_body={"ignore_eos": True},
    )
    for _ in answer if stream else ():
        pass
    after = [counted(name) for name in ("first_token", "between_tokens")]
    assert [b - a for a, b in zip(before, after, strict=True)] == [2, 2]
