"""What happens is counted once, and told to every hook."""

from __future__ import annotations

import logging
import threading

import pytest

from kvconnect import trace as module
from kvconnect.trace import Event, Gauge, Metrics, count, trace, warn_once


@pytest.fixture
def metrics(monkeypatch) -> Metrics:
    fresh = Metrics()
    monkeypatch.setattr(module, "metrics", fresh)
    return fresh


def test_a_span_counts_its_numbers_and_its_time(metrics: Metrics):
    with trace("store.load", blocks=8) as span:
        span.set(loaded=7)
    with trace("store.load", blocks=2):
        pass
    counters = metrics.snapshot()
    assert counters["store.load"] == 2
    assert counters["store.load.blocks"] == 10
    assert counters["store.load.loaded"] == 7
    assert counters["store.load.seconds"] > 0
    assert "store.load.errors" not in counters


def test_an_error_is_counted_and_goes_on(metrics: Metrics):
    events: list[Event] = []
    metrics.add_hook(events.append)
    error = ValueError("planted")
    with pytest.raises(ValueError, match="planted"), trace("store.save"):
        raise error
    assert metrics.snapshot()["store.save.errors"] == 1
    assert events[0].error is error


def test_a_count_has_no_time(metrics: Metrics):
    count("frame.bad", bytes=3)
    assert metrics.snapshot() == {"frame.bad": 1, "frame.bad.bytes": 3}


def test_a_removed_hook_hears_nothing_more(metrics: Metrics):
    heard: list[str] = []
    remove = metrics.add_hook(lambda event: heard.append(event.name))
    count("first")
    remove()
    count("second")
    assert heard == ["first"]


def test_a_hook_may_count_itself(metrics: Metrics):
    metrics.add_hook(lambda event: event.name == "outer" and count("inner"))
    count("outer")
    assert metrics.snapshot() == {"outer": 1, "inner": 1}


def test_a_hook_that_fails_does_not_break_what_is_traced(metrics: Metrics, caplog):
    heard: list[str] = []

    def broken(event: Event) -> None:
        raise RuntimeError("a user's bug")

    metrics.add_hook(broken)
    metrics.add_hook(lambda event: heard.append(event.name))
    with caplog.at_level(logging.WARNING, "kvconnect"):
        count("first")
        count("second")
    assert heard == ["first", "second"]
    assert metrics.snapshot()["first"] == 1
    assert sum("a user's bug" in record.getMessage() for record in caplog.records) == 1


def test_events_from_many_threads_are_all_counted(metrics: Metrics):
    threads = [
        threading.Thread(target=lambda: [count("event", one=1) for _ in range(500)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.snapshot() == {"event": 2000, "event.one": 2000}


def test_a_warning_is_given_once_and_repeated_only_for_debugging(metrics: Metrics, caplog):
    with caplog.at_level(logging.DEBUG, "kvconnect"):
        warn_once("disk-full", "the disk is full")
        warn_once("disk-full", "the disk is full")
        warn_once("dead", "the store is dead")
    levels = [record.levelname for record in caplog.records]
    assert levels == ["WARNING", "DEBUG", "WARNING"]


DISK = (("store", "disk"),)


def test_what_happens_to_several_is_counted_apart_and_together(metrics: Metrics):
    count("store.timeout", DISK)
    count("store.timeout", (("store", "redis"),))
    count("store.timeout")
    with trace("store.load", DISK, blocks=2):
        pass
    assert metrics.snapshot()["store.timeout"] == 3
    assert metrics.by_labels()[DISK]["store.timeout"] == 1
    assert metrics.by_labels()[DISK]["store.load.blocks"] == 2
    assert metrics.by_labels()[()] == {"store.timeout": 1}


def test_a_hook_is_told_whose_event_it_is(metrics: Metrics):
    heard = []
    metrics.add_hook(lambda event: heard.append(event.labels))
    count("store.timeout", DISK)
    count("other")
    assert heard == [DISK, ()]


def test_gauges_are_read_when_they_are_asked_for(metrics: Metrics):
    size = 3.0
    remove = metrics.add_gauges(lambda: {"staging.free": size}, DISK)
    size = 5.0
    assert metrics.gauges() == [Gauge("staging.free", 5.0, DISK)]
    remove()
    remove()
    assert metrics.gauges() == []


def test_a_gauge_that_fails_is_told_once_and_hides_no_other(metrics: Metrics, caplog):
    metrics.add_gauges(lambda: 1 / 0)
    metrics.add_gauges(lambda: {"fine": 1.0})
    with caplog.at_level(logging.WARNING, "kvconnect"):
        assert [one.name for one in metrics.gauges() + metrics.gauges()] == ["fine", "fine"]
    assert len(caplog.records) == 1
