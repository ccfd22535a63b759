"""What a server holds, as its events say: restarts, gaps, media, foreign hashes."""

from __future__ import annotations

import asyncio
import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.events.format import (
    CPU,
    GPU,
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
)
from kvconnect.events.held import HeldBlocks
from kvconnect.events.links import prefix_links
from kvconnect.events.publisher import EventPublisher
from kvconnect.events.settings import EventsConfig
from kvconnect.events.subscriber import Followed, follow

T = 2


def stored(keys, tokens, parent=None, medium=GPU, **more):
    return BlockStored(keys, parent, tokens, T, None, medium, None, **more)


def moved(key, medium):
    return BlockStored([key], None, [], 0, None, medium, None)


def matched(held, tokens, *more):
    return held.matched(prefix_links(tokens, T, *more))


@pytest.fixture
def held():
    made = HeldBlocks(1000)
    made.apply([stored([1, 2], [5, 5, 6, 6]), stored([b"x"], [7, 7], parent=2)])
    return made


def test_a_prompt_is_matched_up_to_its_last_held_block(held):
    assert matched(held, [5, 5, 6, 6, 7, 7, 8, 8]) == 3
    assert matched(held, [5, 5, 6, 6, 7]) == 2
    assert matched(held, [6, 6, 5, 5]) == 0
    assert held.block_size == T


def test_a_block_is_held_until_it_has_left_every_medium(held):
    held.apply([moved(2, CPU), BlockRemoved([2], GPU)])
    assert matched(held, [5, 5, 6, 6]) == 2
    held.apply([BlockRemoved([2], CPU)])
    assert matched(held, [5, 5, 6, 6, 7, 7]) == 1
    held.apply([stored([2], [6, 6], parent=1)])
    assert matched(held, [5, 5, 6, 6, 7, 7]) == 3


def test_cleared_blocks_and_blocks_of_no_known_parent_do_not_count(held):
    held.apply([AllBlocksCleared(), stored([9], [7, 7], parent=2), BlockRemoved([1], GPU)])
    assert len(held) == 0
    assert matched(held, [7, 7]) == 0


def test_adapters_salts_and_other_pools_are_apart(held):
    ada = BlockStored([3], None, [5, 5], T, None, GPU, "ada")
    salted = stored([4], [9, 9], extra_keys=[["digest"]])
    held.apply([ada, salted, stored([5], [4, 4], group_idx=1), BlockRemoved([1], GPU, 1)])
    assert matched(held, [5, 5], "ada") == 1
    assert matched(held, [9, 9]) == 0
    assert matched(held, [9, 9], None, "digest") == 1
    assert matched(held, [4, 4]) == 0
    assert matched(held, [5, 5]) == 1


def test_a_server_that_stores_without_end_is_known_in_part():
    held = HeldBlocks(10)
    for number in range(1000):
        held.apply([stored([number], [number, number])])
    assert (len(held), len(held._media), len(held._held)) == (10, 10, 10)
    assert matched(held, [999, 999]) == 1


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([GPU, CPU, None]), st.booleans())))
def test_any_order_of_events_keeps_the_books(steps):
    held = HeldBlocks(3)
    for key, medium, add in steps:
        held.apply(
            [stored([key], [key, key], medium=medium) if add else BlockRemoved([key], medium)]
        )
    assert len(held) == len(held._media) == sum(held._held.values()) <= 3
    assert all(held._media.values())


def batch(ts, *events):
    return msgspec.msgpack.encode(Batch(ts, list(events)))


def test_a_gap_is_replayed_before_what_follows_it():
    followed = Followed(HeldBlocks(10))
    assert followed.take(0, batch(1, stored([1], [1, 1])))
    assert not followed.take(2, batch(3, stored([3], [3, 3], parent=2)))
    assert followed.take(1, batch(2, stored([2], [2, 2], parent=1)), replayed=True)
    assert followed.take(2, batch(3, stored([3], [3, 3], parent=2)), replayed=True)
    assert followed.take(1, batch(2, AllBlocksCleared())), "it came already"
    assert matched(followed.held, [1, 1, 2, 2, 3, 3]) == 3


def test_a_gap_for_good_forgets_what_may_be_gone():
    followed = Followed(HeldBlocks(10))
    followed.take(0, batch(1, stored([1], [1, 1])))
    assert followed.take(5, batch(6, stored([2], [2, 2])), replayed=True)
    assert matched(followed.held, [1, 1]) == 0
    assert matched(followed.held, [2, 2]) == 1
    assert followed.take(6, batch(7))


def test_numbers_that_begin_again_are_another_publishers():
    followed = Followed(HeldBlocks(10))
    for number in range(5):
        followed.take(number, batch(number, stored([number], [number, number])))
    assert followed.take(0, batch(10, stored([9], [9, 9])))
    assert [matched(followed.held, [n, n]) for n in (0, 4, 9)] == [0, 0, 1]
    assert not followed.take(2, batch(12))


async def test_a_follower_knows_what_was_published_before_and_after_it_came():
    events = []
    ids = itertools.count()
    publisher = EventPublisher(EventsConfig(endpoint="tcp://127.0.0.1:0", topic="kv"))
    layout = pytest.importorskip("kvconnect.layout").KvCacheLayout(1, 1, 4, 4, T, _float32())
    publisher.start(lambda: [events.pop(0) for _ in range(len(events))], [layout])

    def publish(number):
        events.append(_stored_event(next(ids), number))
        publisher.ring()

    publish(1)
    held = HeldBlocks(100)
    address = publisher.address
    task = asyncio.create_task(
        follow(address.endpoint, address.replay_endpoint, address.topic, held)
    )
    try:
        number = 1
        while matched(held, [1, 1]) == 0 or matched(held, [number, number]) == 0:
            number += 1
            publish(number)
            await asyncio.sleep(0.01)
        assert all(matched(held, [one, one]) for one in range(1, number + 1))
    finally:
        task.cancel()
        await asyncio.wait({task})
        publisher.close()


def _float32():
    import torch

    return torch.float32


def _stored_event(event_id, number):
    from kvconnect.cache.pool.events import KvCacheEvent, PublishedBlock, Stored
    from kvconnect.keys import BlockKey, Namespace

    block = PublishedBlock(
        BlockKey(number.to_bytes(32, "big")),
        (number, number), 0, 35, None, has_cache_salt=False, namespace=Namespace().id.digest,
    )  # fmt: skip
    return KvCacheEvent(event_id, None, Stored(None, (block,)))
