"""Published events: a subscriber with vLLM's structs, gaps, replay, slow ones."""

from __future__ import annotations

import itertools
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from event_subscriber import AllBlocksCleared, BlockRemoved, BlockStored, Subscriber
from waiting import until

from kvconnect.cache.block_manager import BlockManager
from kvconnect.cache.pool.events import KvCacheEvent, Removed
from kvconnect.config import KvCacheConfig
from kvconnect.errors import ConfigurationError
from kvconnect.events import publisher as publisher_module
from kvconnect.events.publisher import EventPublisher
from kvconnect.events.settings import EventsConfig
from kvconnect.keys import KeyChain, Namespace, root_key
from kvconnect.layout import KvCacheLayout
from kvconnect.tokens import TokenBuffer
from kvconnect.trace import metrics

T = 4
LAYOUT = KvCacheLayout(1, 1, 4, 4, T, torch.float32)
ANY = "tcp://127.0.0.1:0"


@pytest.fixture
def published():
    """Starts publishers and subscribers, which end with the test."""
    made = []

    def make(thing):
        made.append(thing)
        return thing

    yield make
    for one in reversed(made):
        one.close()


def opened(published, take, layouts=(LAYOUT,), **fields):
    publisher = published(EventPublisher(EventsConfig(endpoint=ANY, **fields)))
    publisher.start(take, layouts)
    return publisher


def wait_for(subscriber, first, count):
    """Batches from `first` on, once there are `count`."""
    found = []
    while len(found) < count:
        found = subscriber.replay(first)
    return found


def manager(num_host_blocks=0, **fields):
    config = {"tokens_per_block": T, "event_buffer_max_size": 1000} | fields
    return BlockManager(
        KvCacheConfig(**config), LAYOUT, num_blocks=8, num_host_blocks=num_host_blocks
    )


def chain(tokens, **namespace):
    root = root_key(b"m", [LAYOUT], Namespace(**namespace))
    return KeyChain(root, T, TokenBuffer(np.array(tokens, np.int32)))


def watched(published, cache=None, **fields):
    """A cache, what publishes its events, and who has everything from the first batch on."""
    cache = cache or manager()
    publisher = opened(published, cache.take_events, **fields)
    return cache, publisher, published(Subscriber(publisher.address))


def add(cache, number, tokens, **namespace):
    cache.add_sequence(number, tokens, keys=chain(tokens, **namespace), **namespace)
    cache.commit(number, len(tokens))
    cache.release(number)


def test_stored_blocks_have_keys_parent_tokens_and_adapter(published):
    cache, publisher, one = watched(published, topic="kv")
    add(cache, 1, list(range(10)))
    publisher.ring()
    [(zero, cleared), (first, batch)] = wait_for(one, 0, 2)
    assert (zero, first) == (0, 1)
    assert cleared.events == [AllBlocksCleared()]
    keys = chain(list(range(8))).keys()
    assert batch.events == [
        BlockStored(
            keys, None, list(range(8)), T, None, "GPU", None,
            group_idx=0, kv_cache_spec_kind="full_attention",
        )
    ]  # fmt: skip
    assert batch.data_parallel_rank == 0
    add(cache, 2, [*range(8), 20, 21, 22, 23])
    add(cache, 3, [5] * 4, lora_id="ada", cache_salt="secret")
    publisher.ring()
    events = [event for _, later in wait_for(one, 2, 1) for event in later.events]
    while len(events) < 2:
        events = [event for _, later in one.replay(2) for event in later.events]
    assert events[0].parent_block_hash == keys[1]
    assert events[1].lora_name == "ada"
    [digest] = events[1].extra_keys[0]
    assert digest == Namespace("secret", "ada").id.digest.hex(), "never the salt"


def test_removed_blocks_say_from_where(published):
    cache, publisher, one = watched(published, cache=manager(num_host_blocks=2))
    add(cache, 1, [1] * 8)
    for number in range(2, 9):
        add(cache, number, [number] * 32)
    publisher.ring()
    held = {}
    for _, batch in wait_for(one, 1, 1):
        for event in batch.events:
            for key in event.block_hashes:
                media = held.setdefault(key, set())
                if isinstance(event, BlockStored):
                    assert event.medium not in media
                    media.add(event.medium)
                else:
                    media.remove(event.medium)
    known = [media for media in held.values() if media]
    assert sorted(map(sorted, known)) == [["CPU"]] * 2 + [["GPU"]] * 8
    assert len(held) > len(known)


def test_blocks_that_are_partly_filled_are_not_published(published):
    cache, publisher, one = watched(published)
    add(cache, 1, [1, 2])
    cache.reset()
    add(cache, 2, [1] * 4)
    publisher.ring()
    [(_, batch)] = wait_for(one, 1, 1)
    assert [type(event) for event in batch.events] == [BlockStored]


def test_a_subscriber_gets_batches_with_its_topic_in_order(published):
    cache, publisher, one = watched(published, topic="kv@here")
    number = 0
    while not one.sub.poll(0):  # until it is connected
        number += 1
        add(cache, number, [number] * 4)
        publisher.ring()
    topic, first, _ = one.next()
    assert topic == "kv@here"
    for number in (9998, 9999):
        add(cache, number, [number] * 4)
        publisher.ring()
    stored = [first]
    tokens = []
    while tokens != [9999] * 4:
        _, next_number, batch = one.next()
        stored.append(next_number)
        tokens = next(e.token_ids for e in reversed(batch.events) if isinstance(e, BlockStored))
    assert stored == list(range(first, first + len(stored)))


def test_missed_batches_are_replayed_as_far_as_they_are_kept(published):
    publisher = opened(published, list, buffer_steps=3)
    publisher.close()  # the thread is not needed
    kept = publisher._kept
    for number in range(1, 6):
        kept.add(number, b"x")
    assert [number for number, _ in kept.since(0)] == [3, 4, 5]
    assert [number for number, _ in kept.since(5)] == [5]
    kept.add(6, bytes(publisher_module._KEPT_NBYTES))
    assert [number for number, _ in kept.since(0)] == [6]


def test_lost_events_clear_what_subscribers_believe(published):
    cache = manager(event_buffer_max_size=2)
    before = metrics.snapshot().get("events.dropped.events", 0)
    for number in range(1, 6):
        add(cache, number, [number] * 4)
    _, publisher, one = watched(published, cache)
    publisher.ring()
    [(_, batch)] = wait_for(one, 1, 1)
    assert [type(event) for event in batch.events] == [
        *(AllBlocksCleared, BlockStored, BlockStored)
    ]
    assert metrics.snapshot()["events.dropped.events"] - before == 4  # one of them: Created


def test_a_subscriber_that_reads_nothing_delays_nothing(published, monkeypatch):
    """It misses batches, which the replay has; the publisher keeps few messages for it."""
    monkeypatch.setattr(publisher_module, "_UNSENT", 10)
    ids = itertools.count()

    def take():
        return [KvCacheEvent(next(ids), None, Removed((bytes(32),), 0)) for _ in range(256 * 20)]

    publisher = opened(published, take)
    stuck = published(Subscriber(publisher.address, RCVHWM=1, RCVBUF=4096))
    one = published(Subscriber(publisher.address))
    while not stuck.sub.poll(0):  # until it is connected
        publisher.ring()
        one.replay(1 << 40)
    last = 0
    while last < 400:
        publisher.ring()
        last = next(iter([number for number, _ in one.replay(last)][-1:]), last)
    received = [stuck.next()[1]]
    while stuck.sub.poll(100):
        received.append(stuck.next()[1])
    assert len(received) < last
    [missed, *_] = [a + 1 for a, b in pairwise([*received, last]) if b != a + 1]
    assert one.replay(missed)[0][0] == missed


def test_batches_are_divided_by_their_bytes(published):
    """So that the messages kept for one slow subscriber have a bound in bytes."""
    cache = BlockManager(
        KvCacheConfig(tokens_per_block=T, event_buffer_max_size=1000), LAYOUT, num_blocks=20_000
    )
    tokens = [2**31 - 1 - n for n in range(60_000)]
    add(cache, 1, tokens, cache_salt="secret")
    cache.reset()
    _, publisher, one = watched(published, cache)
    publisher.ring()
    found = wait_for(one, 1, 2)
    while not isinstance(found[-1][1].events[-1], BlockRemoved):
        found = one.replay(1)
    sizes = [len(payload) for _, payload in publisher._kept.since(0)]
    assert publisher_module._BATCH_NBYTES // 4 < max(sizes) <= publisher_module._BATCH_NBYTES
    events = [event for _, batch in found for event in batch.events]
    stored = [event for event in events if isinstance(event, BlockStored)]
    assert [token for event in stored for token in event.token_ids] == tokens
    keys = chain(tokens, cache_salt="secret").keys()
    assert [key for event in stored for key in event.block_hashes] == keys
    parents = [event.parent_block_hash for event in stored]
    assert parents == [None, *(event.block_hashes[-1] for event in stored[:-1])]
    removed = [
        key for event in events if isinstance(event, BlockRemoved) for key in event.block_hashes
    ]
    assert sorted(removed) == sorted(keys)


def test_what_was_published_before_forget_is_not_replayed(published):
    cache, publisher, one = watched(published)
    add(cache, 1, [7] * 4)
    publisher.ring()
    wait_for(one, 1, 1)
    add(cache, 2, [8] * 4)  # is not taken yet
    publisher.forget()
    assert one.replay(0) == []
    add(cache, 3, [9] * 4)
    publisher.ring()
    [(number, batch)] = wait_for(one, 0, 1)
    assert (number, batch.events[0].token_ids) == (3, [9] * 4)
    publisher.close()
    publisher.forget()


def test_what_comes_while_it_closes_is_published():
    closing_at_call = []

    def take():
        closing_at_call.append(publisher._closing)
        until(lambda: publisher._closing)
        return []

    publisher = EventPublisher(EventsConfig(endpoint=ANY))
    publisher.start(take, (LAYOUT,))
    publisher.close()
    publisher._thread.join(60)
    assert closing_at_call[-1:] == [True]


def test_an_error_of_any_kind_is_shown_and_survived(published, monkeypatch):
    monkeypatch.setattr(publisher_module, "_ERROR_WAIT_S", 0.0)
    cache = manager()
    broken = []

    def take():
        if broken:
            raise broken[0]
        return cache.take_events()

    publisher = opened(published, take)
    one = published(Subscriber(publisher.address))
    add(cache, 1, [7] * 4)
    publisher.ring()
    wait_for(one, 1, 1)
    assert publisher.problem is None
    broken.append(RuntimeError("out of order"))
    add(cache, 2, [8] * 4)
    publisher.ring()
    while publisher.problem is None:
        pass
    assert publisher.problem == "RuntimeError: out of order"
    publisher.forget()  # waits for no recovery
    broken.clear()
    while publisher.problem is not None:
        pass
    add(cache, 3, [9] * 4)
    publisher.ring()
    (_, cleared), (_, batch) = wait_for(one, 2, 2)
    assert cleared.events == [AllBlocksCleared()]
    stored = [event.token_ids for event in batch.events if isinstance(event, BlockStored)]
    assert stored == [[9] * 4], "what may be lost in part is not published"


@pytest.mark.parametrize(
    "frames", [(), (b"",), (b"", b"short"), (b"x", bytes(8)), (b"", bytes(8), b"")]
)
def test_a_wrong_request_for_replay_changes_nothing(published, frames):
    publisher = opened(published, list)
    one = published(Subscriber(publisher.address))
    one.req.send_multipart(frames or (b"",))
    assert [number for number, _ in one.replay(0)] == [0]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"endpoint": "ipc://x"}, "tcp://HOST:PORT"),
        ({"endpoint": "tcp://127.0.0.1"}, "tcp://HOST:PORT"),
        ({"endpoint": "tcp://*:70000"}, "tcp://HOST:PORT"),
        ({"endpoint": "tcp://*:65535"}, "no port after"),
        ({"endpoint": ANY, "replay_endpoint": "5558"}, "tcp://HOST:PORT"),
        ({"endpoint": ANY, "buffer_steps": 0}, "buffer_steps"),
    ],
)
def test_wrong_endpoints_are_refused(fields, said):
    with pytest.raises(ConfigurationError, match=said):
        EventsConfig(**fields)


def test_a_taken_port_is_refused_and_nothing_is_left(published):
    taken = published(EventPublisher(EventsConfig(endpoint=ANY))).address.endpoint
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ConfigurationError, match=r"events\.endpoint.*in use"):
        EventPublisher(EventsConfig(endpoint=taken))
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_the_replay_endpoint_is_the_next_port():
    assert EventsConfig(endpoint="tcp://*:5557").replay == "tcp://*:5558"
    assert EventsConfig(endpoint=ANY).replay == ANY
