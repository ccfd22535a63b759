"""An engine that publishes its events; the publisher itself is tested in tests/events."""

from __future__ import annotations

import threading

import pytest
from event_subscriber import BlockRemoved, BlockStored, Subscriber

from kvconnect import LLM, SamplingParams
from kvconnect.errors import ConfigurationError

ONE = SamplingParams(max_tokens=1)
ANY = "tcp://127.0.0.1:0"


def batches(one, count):
    found = []
    while len(found) < count:
        found = one.replay(0)
    return [event for _, batch in found for event in batch.events]


def test_an_engine_publishes_what_it_holds(open_llm, llama):
    llm = open_llm(llama, events=ANY, max_tokens=64)
    llm.generate([1] * 40, ONE)
    address = llm.events_address
    one = Subscriber(address)
    stored = batches(one, 2)[1]
    assert isinstance(stored, BlockStored)
    assert stored.token_ids == [1] * 32
    llm.generate([2] * 60, ONE)  # there is room for nothing else
    [removed] = [event for event in batches(one, 3) if isinstance(event, BlockRemoved)][:1]
    assert set(removed.block_hashes) <= set(stored.block_hashes)
    assert llm.take_events() == []
    llm.close()
    one.close()
    assert not any(thread.name == "kvconnect-events" for thread in threading.enumerate())


def test_tokens_of_a_cache_that_was_reset_are_not_replayed(open_llm, llama):
    llm = open_llm(llama, events=ANY)
    llm.generate([1] * 40, ONE)
    one = Subscriber(llm.events_address)
    batches(one, 2)
    assert llm.reset_prefix_cache()
    assert one.replay(0) == []
    one.close()


def test_without_events_nothing_listens(llm):
    assert llm.events_address is None


def test_an_engine_that_cannot_be_made_leaves_no_socket(open_llm, llama, tmp_path):
    llm = open_llm(llama, events=ANY)
    with pytest.raises(ConfigurationError, match=r"events\.endpoint"):
        LLM(llama, events={"endpoint": llm.events_address.endpoint, "replay_endpoint": ANY})
    endpoint = llm.events_address.endpoint
    llm.close()
    with pytest.raises(ConfigurationError, match="model"):
        LLM(tmp_path, events={"endpoint": endpoint, "replay_endpoint": ANY})
    again = open_llm(llama, events={"endpoint": endpoint, "replay_endpoint": ANY})
    assert again.events_address.endpoint == endpoint
    assert again.events_address.publisher != llm.events_address.publisher


def test_a_missing_extra_is_named(open_llm, llama, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "kvconnect.events.publisher", None)
    with pytest.raises(ConfigurationError, match=r"kvconnect\[events\]"):
        open_llm(llama, events=ANY)
