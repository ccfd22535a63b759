"""The numbers of the page and of `top`: those of the metrics, each where it belongs."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvconnect import trace as trace_module
from kvconnect.explain.outcome import Outcome
from kvconnect.prometheus import Collector, snapshot
from kvconnect.prometheus.overview import Overview, StoreNumbers
from kvconnect.trace import Metrics, count

DISK = (("store", "DiskBackend"), ("place", "disk:///kv"))


@pytest.fixture(autouse=True)
def metrics(monkeypatch) -> Metrics:
    fresh = Metrics()
    monkeypatch.setattr(trace_module, "metrics", fresh)
    monkeypatch.setattr(snapshot, "metrics", fresh)
    return fresh


def test_a_process_without_an_event_has_zeros():
    found = Overview.now()
    assert (found.engine, found.prompt_tokens, found.lost_tokens) == ("kvconnect", 0, 0)
    assert (found.stores, found.device_blocks) == ([], {})


def test_every_prompt_token_has_an_outcome_and_the_lost_ones_are_summed():
    tokens = {f"{outcome}_tokens": 2**at for at, outcome in enumerate(Outcome)}
    count(
        "engine.request",
        prompt_tokens=100_000,
        device_tokens=5,
        host_tokens=6,
        store_tokens=7,
        ceiling_tokens=50.5,
        **tokens,
    )
    found = Overview.now()
    assert found.prompt_tokens == 100_000 == sum(found.outcomes.values())
    assert found.outcomes["unexplained"] == 100_000 - sum(tokens.values())
    assert found.lost_tokens == sum(
        found.outcomes[one]
        for one in found.outcomes
        if one not in {"reused", "new", "unreached", "unexplained"}
    )
    assert (found.reused_tokens, found.ceiling_tokens, found.requests) == (18, 50.5, 1)
    assert found.hit_tokens == {"device": 5, "host": 6, "store": 7}


def test_a_store_has_its_numbers_while_it_is_open(metrics):
    count("store.load", DISK, bytes=3000, loaded=2, seconds=0.5)
    count("store.save", DISK, bytes=40, saved=1)
    count("store.lookup", DISK, misses=1)
    count("store.timeout", DISK)
    assert Overview.now().stores == []
    gauges = {"store.breaker_state": 2.0, "store.bytes": 70.0, "store.capacity": 100.0}
    hide = metrics.add_gauges(lambda: gauges, DISK)
    (store,) = Overview.now().stores
    assert (store.store, store.place) == ("DiskBackend", "disk:///kv")
    assert (store.used_bytes, store.capacity_bytes, store.breaker_state) == (70, 100, 2)
    assert (store.loads, store.loaded_bytes, store.load_s) == (1, 3000, 0.5)
    assert (store.saves, store.saved_bytes, store.lookups, store.misses) == (1, 40, 1, 1)
    assert store.failures == 1
    assert (store.blocks, store.pinned_bytes) == (None, None)
    hide()


def test_what_a_scrape_says_is_the_same(metrics):
    count("engine.request", prompt_tokens=10, reused_tokens=4, device_tokens=4, ceiling_tokens=6)
    count("store.load", DISK, bytes=3000, loaded=2)
    metrics.add_gauges(lambda: {"store.breaker_state": 0.0, "store.bytes": 70.0}, DISK)
    metrics.add_gauges(lambda: {"engine.blocks.used": 3.0, "engine.requests.running": 1.0})
    registry = CollectorRegistry()
    registry.register(Collector())
    scraped = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for one in family.samples:
            scraped.setdefault(one.name, []).append((one.labels, one.value))
    found, now = Overview.of(scraped, "kvconnect"), Overview.now()
    found.at = now.at
    assert found == now
    assert found.prompt_tokens == 10


def test_json_has_the_names_of_the_fields():
    told = Overview(stores=[StoreNumbers("a", "b")]).as_json()
    assert told["engine"] is None
    assert told["stores"][0]["used_bytes"] is None
