"""Which blocks a full store drops, and that it never holds more than it may."""

from __future__ import annotations

import pytest

from kvconnect.errors import ConfigurationError

# The disk store keeps up to an eighth of a small capacity for its index.
SLOTS = 64

# Others have no capacity of their own.
pytestmark = pytest.mark.parametrize("make_bare", ["memory", "disk"], indirect=True)


@pytest.fixture
async def small(make_bare, kit):
    async with kit.opened(make_bare(capacity=SLOTS * kit.frame_nbytes)) as store:
        yield store


async def press(store, kit, blocks, **options):
    """Save so many other blocks, in chains of 8."""
    for chain in range(0, blocks, 8):
        keys = kit.keys("press", options, chain, count=8)
        assert await store.save(kit.chain(keys, **options)) == 8


async def test_what_was_used_longest_ago_goes_first(small, kit):
    kept, left = kit.keys("kept", count=8), kit.keys("left", count=8)
    await small.save(kit.chain(kept))
    await small.save(kit.chain(left))
    for turn in range(10):
        assert await small.save(kit.chain(kit.keys("turn", turn, count=16))) == 16
        assert await small.lookup(kept) == 8
    assert await kit.stored(small, left) == [False] * 8
    assert await kit.stored(small, kept) == [True] * 8


async def test_low_priority_goes_before_high(small, kit):
    high = kit.keys("high", count=16)
    await small.save(kit.chain(high, priority=80))
    await press(small, kit, 2 * SLOTS, priority=20)
    assert await small.lookup(high) == 16


async def test_high_priority_goes_when_there_is_nothing_else(small, kit):
    high = kit.keys("high", count=SLOTS - 16)
    await small.save(kit.chain(high, priority=80))
    await press(small, kit, 2 * SLOTS, priority=80)
    assert await kit.stored(small, high) == [False] * len(high)


async def test_use_of_a_dropped_block_still_counts_for_its_ancestors(small, kit):
    base, other = kit.keys("base", count=4), kit.keys("other", count=20)
    tail = kit.key("tail")
    await small.save([*kit.chain(base), kit.block(tail, base[-1], priority=1)])
    await small.save(kit.chain(other))
    assert await small.load([tail], kit.buffers(1)) == 1
    for number in range(SLOTS - 25 + 10):
        await small.save(kit.chain(kit.keys("single", number, count=1)))
    assert await kit.stored(small, [tail]) == [False]
    assert await kit.stored(small, base) == [True] * 4
    assert not all(await kit.stored(small, other))


async def test_block_of_high_priority_keeps_its_low_priority_ancestors(small, kit):
    keys = kit.keys("mixed", count=6)
    chain = [*kit.chain(keys[:5], priority=1), kit.block(keys[5], keys[4], priority=90)]
    await small.save(chain)
    await press(small, kit, 2 * SLOTS, priority=50)
    assert await small.lookup(keys) == 6


async def test_chain_longer_than_the_store_keeps_its_beginning(small, kit):
    keys = kit.keys("too long", count=2 * SLOTS)
    saved = await small.save(kit.chain(keys))
    assert SLOTS * 3 // 4 < saved <= SLOTS
    assert await small.lookup(keys) == saved
    # The end of a chain is not dropped for more of the same chain.
    assert await small.save([kit.block(keys[saved], keys[saved - 1])]) == 0
    assert await small.lookup(keys) == saved


async def test_capacity_of_one_block_holds_one(make_bare, kit):
    async with kit.opened(make_bare(capacity=kit.frame_nbytes)) as store:
        for number in range(3):
            assert await store.save([kit.block(kit.key(number))]) == 1
            assert await kit.stored(store, [kit.key(number)]) == [True]
        assert (await store.stats())["blocks"] == 1


async def test_capacity_below_one_block_is_refused(make_bare, kit):
    store = make_bare(capacity=kit.frame_nbytes - 1)
    with pytest.raises(
        ConfigurationError,
        match=rf"capacity={kit.frame_nbytes - 1}: .* give capacity=12KiB or more",
    ):
        await store.open([kit.layout])
    await store.close()
