"""Several stores as one: where blocks come from and go to."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from tier_store import DictTier, tiered, until

from kvconnect.backends import open_backend
from kvconnect.backends.tiered.settings import TieredSettings, parse_tiered
from kvconnect.backends.tiered.store import TieredBackend
from kvconnect.backends.url import StoreUrl
from kvconnect.errors import BackendUnavailable, ConfigurationError
from kvconnect.redaction import without_passwords
from kvconnect.trace import metrics

END = 4e9  # Unix seconds


async def written(store, number=0):
    """Until nothing waits to be written to a tier."""
    await until(lambda: not len(store.tiers[number].backlog))


def frames(kit, keys, parent=None):
    """A chain of blocks with all that is known of them."""
    return [
        replace(
            block,
            tokens=np.arange(16, dtype=np.int32),
            priority=70,
            namespace=b"n" * 32,
            model=b"m" * 32,
            group=0,
            expires_at=END,
        )
        for block in kit.chain(keys)
    ]


# ------------------------------------------------------------------------------------ reading


async def test_prefix_in_pieces_is_counted_and_loaded_in_order(kit):
    one, two, three = DictTier(), DictTier(), DictTier()
    keys = kit.keys("pieces", count=10)
    blocks = kit.chain(keys)
    one.put(*blocks[:2], *blocks[6:8])
    two.put(*blocks[2:4])
    three.put(*blocks[4:6], blocks[8])
    async with tiered(one, two, three) as store:
        into = kit.buffers(10)
        assert await store.lookup(keys) == await store.load(keys, into) == 9
        assert all(kit.holds(b, key) for b, key in zip(into[:9], keys, strict=False))
        assert kit.untouched(into[9])


async def test_block_is_loaded_from_the_first_tier_that_has_it(kit):
    one, two = DictTier(), DictTier()
    keys = kit.keys("first", count=4)
    one.put(*kit.chain(keys)[:2])
    two.put(*kit.chain(keys))
    async with tiered(one, two) as store:
        assert await store.load(keys, kit.buffers(4)) == 4
    assert one.loads == keys[:2]
    assert two.loads == keys[2:]


async def test_lookup_does_not_ask_again_where_a_run_ended(kit):
    one, two = DictTier(), DictTier()
    keys = kit.keys("ends", count=4)
    one.put(*kit.chain(keys)[:2])
    two.put(*kit.chain(keys)[:2])
    async with tiered(one, two) as store:
        assert await store.lookup(keys) == 2
    assert (len(one.asked), len(two.asked)) == (1, 1)


async def test_what_a_slower_tier_had_is_copied_to_the_faster_ones_with_all_that_is_known(kit):
    one, two, three = DictTier(), DictTier(), DictTier()
    keys = kit.keys("promote", count=4)
    three.put(*frames(kit, keys))
    async with tiered(one, two, three) as store:
        into = kit.buffers(4)
        assert await store.load(keys, into) == 4
        for buffer in into:
            buffer.zero_()  # handed on, as the caller may do now
        await written(store, 0)
        await written(store, 1)
        for tier in (one, two):
            assert tier.keys() == set(keys)
            for key, block in zip(keys, frames(kit, keys), strict=True):
                copy = tier.blocks[key]
                assert torch.equal(copy.data, block.data)
                assert (copy.parent, copy.priority, copy.expires_at) == (block.parent, 70, END)
                assert (copy.namespace, copy.model) == (b"n" * 32, b"m" * 32)
                assert copy.tokens.tolist() == list(range(16))
        two.calls.clear()
        assert await store.load(keys, kit.buffers(4)) == 4
        assert two.calls["load"] == 0


@pytest.mark.parametrize("fault", ["its time ends", "it fails"])
async def test_a_block_whose_end_is_not_known_is_not_copied_without_one(kit, fault):
    """It ended, or its store failed, after it was loaded."""

    async def strike(name):
        if name == "describe" and fault == "it fails":
            raise ConnectionError("the store is gone")
        if name == "describe":
            two.blocks.clear()

    one, two = DictTier(), DictTier(shared=True, expires_each=True, before=strike)
    keys = kit.keys("ending", count=2)
    two.put(*frames(kit, keys))
    async with tiered(one, two) as store:
        assert await store.load(keys, kit.buffers(2)) == 2
        await written(store)
    assert not one.blocks


async def test_promotion_copies_the_value_not_the_buffer(kit):
    one, two = DictTier(variable_length=True), DictTier(variable_length=True)
    key = kit.key("shorter")
    two.put(kit.block(key, nbytes=5000))
    async with tiered(one, two) as store:
        assert store.capabilities.variable_length
        assert await store.load([key], [kit.buffer(8192)]) == 1
        await written(store)
    assert one.blocks[key].data.numel() == 5000


async def test_promotion_takes_no_more_memory_than_it_may(kit):
    one, two = DictTier(), DictTier()
    keys = kit.keys("bounded", count=8)
    two.put(*kit.chain(keys))
    one.hang.add("save")
    before = metrics.snapshot().get("store.tiered.dropped.blocks", 0)
    async with tiered(one, two, queue_nbytes=3 * kit.frame_nbytes) as store:
        for _ in range(3):
            assert await store.load(keys, kit.buffers(8)) == 8
        assert store.tiers[0].backlog.nbytes == 3 * kit.frame_nbytes
        assert len(store.tiers[0].backlog) == 3
        one.recover()
        await written(store)
    assert one.keys() == set(keys[:3])
    assert metrics.snapshot()["store.tiered.dropped.blocks"] - before == 15


async def test_promotion_can_be_switched_off(kit):
    one, two = DictTier(), DictTier()
    keys = kit.keys("off", count=2)
    two.put(*kit.chain(keys))
    async with tiered(one, two, promote=False) as store:
        assert await store.load(keys, kit.buffers(2)) == 2
    assert not one.blocks


# ------------------------------------------------------------------------------------ writing


async def test_save_waits_for_tiers_written_through_only(kit):
    one, two, three = DictTier(), DictTier(), DictTier()
    three.hang.add("save")
    keys = kit.keys("through", count=3)
    async with tiered(one, two, three, write=("through", "through", "behind")) as store:
        blocks = kit.chain(keys)
        assert await store.save(blocks) == 3
        assert one.keys() == two.keys() == set(keys)
        assert not three.blocks
        for block in blocks:
            block.data.zero_()  # handed on
        three.recover()
        await written(store, 2)
        for key in keys:
            assert torch.equal(three.blocks[key].data, one.blocks[key].data)


async def test_close_writes_what_waits(kit):
    one, two = DictTier(), DictTier()
    keys = kit.keys("drain", count=50)
    async with tiered(one, two, write=("through", "behind")) as store:
        assert await store.save(kit.chain(keys)) == 50
    assert two.keys() == set(keys)
    assert not two.is_open


@pytest.mark.parametrize("when", ["waiting", "being written"])
async def test_deleted_block_does_not_come_back_from_the_queue(kit, when):
    one, two = DictTier(), DictTier()
    first, key = kit.keys("resurrect", when, count=2)
    two.hang.add("save")
    async with tiered(one, two, write=("through", "behind")) as store:
        if when == "waiting":
            await store.save([kit.block(first)])
            await asyncio.sleep(0)
        await store.save([kit.block(key)])
        await until(lambda: two.calls["save"])
        await store.delete([key])
        two.recover()
        await written(store, 1)
        assert key not in two.blocks
        assert (first in two.blocks) == (when == "waiting")
        assert await store.lookup([key]) == 0


@pytest.mark.parametrize(
    ("tiers", "stored"),
    [
        ([{}, {"durable": True, "room": 2}], 2),  # only what survives counts as stored
        ([{"room": 1}, {"shared": True}], 3),
        ([{"room": 1}, {}], 3),
        ([{"room": 3}, {"durable": True, "room": 1}, {"durable": True, "room": 2}], 2),
    ],
)
async def test_save_counts_what_the_capabilities_promise(kit, tiers, stored):
    made = [DictTier(**tier) for tier in tiers]
    for tier, options in zip(made, tiers, strict=True):
        tier.room = options.get("room", 100)
    async with tiered(*made) as store:
        assert await store.save(kit.chain(kit.keys("count", count=3))) == stored


@pytest.mark.parametrize(
    ("tiers", "write", "true"),
    [
        ([{"inline": True}, {"durable": True}], ("through",), {"durable"}),
        ([{"inline": True}, {"durable": True}], ("through", "behind"), set()),
        ([{"inline": True}, {"inline": True}], ("through",), {"inline"}),
        ([{"enumerable": True}, {}], ("through",), set()),
        ([{"enumerable": True}, {"enumerable": True}], ("through",), {"enumerable"}),
        ([{}, {"shared": True}], ("through",), {"shared"}),
        ([{"durable": True}, {"shared": True}], ("through",), {"durable"}),
        ([{}, {"durable": True, "shared": True}], ("through",), {"durable", "shared"}),
        ([{"expires": True}, {}], ("through",), set()),
        ([{"expires_each": True}, {}], ("through",), set()),
        ([{"expires_each": True}] * 2, ("through",), {"expires_each"}),
        ([{"variable_length": True}] * 2, ("through",), {"variable_length"}),
    ],
)
def test_capabilities_are_those_that_hold_whichever_tier_has_a_block(tiers, write, true):
    store = TieredBackend([DictTier(**tier) for tier in tiers], TieredSettings(write=write))
    names = (
        "inline",
        "enumerable",
        "durable",
        "shared",
        "expires",
        "expires_each",
        "variable_length",
    )
    assert {name for name in names if getattr(store.capabilities, name)} == true


@pytest.mark.parametrize(("limits", "limit"), [((None, 10), None), ((20, 10), 20)])
def test_longest_value_is_that_of_the_tier_that_takes_most(limits, limit):
    store = TieredBackend([DictTier(max_value_bytes=most) for most in limits])
    assert store.capabilities.max_value_bytes == limit


# ------------------------------------------------------------------------------------ listing


async def test_children_of_all_tiers_are_one_list(kit):
    one, two = DictTier(enumerable=True), DictTier(enumerable=True)
    parent, first, both, last = kit.keys("children", count=4)
    one.put(kit.block(first, parent, tokens=[1]), kit.block(both, parent, tokens=[2]))
    two.put(kit.block(both, parent, tokens=[2]), kit.block(last, parent, tokens=[3]))
    async with tiered(one, two) as store:
        found = {child.key: child.tokens.tolist() for child in await store.children(parent)}
    assert found == {first: [1], both: [2], last: [3]}


async def test_scan_lists_each_block_once(kit):
    one, two = DictTier(enumerable=True), DictTier(enumerable=True)
    keys = kit.keys("scan", count=5)
    one.put(*kit.chain(keys)[:3])
    two.put(*kit.chain(keys)[2:])
    async with tiered(one, two) as store:
        listed = [entry.key async for entry in store.scan()]
        described = await store.describe([*keys, kit.key("absent")])
    assert sorted(listed) == sorted(keys)
    assert [entry and entry.key for entry in described] == [*keys, None]


async def test_stats_are_each_tiers_own(kit):
    one, two = DictTier(), DictTier()
    one.put(*kit.chain(kit.keys("stats", count=2)))
    two.put(*kit.chain(kit.keys("stats", count=3)))
    async with tiered(one, two) as store:
        stats = await store.stats()
    assert (stats["dicttier.blocks"], stats["dicttier2.blocks"], stats["blocks"]) == (2, 3, 3)
    assert stats["dicttier.alive"] == 1
    assert stats["dicttier.waiting"] == 0


# ------------------------------------------------------------------------------------ real tiers


async def test_by_url_a_bad_frame_in_memory_is_replaced_from_disk(kit, tmp_path):
    url = f"tiered:?tiers=memory:?capacity=1MiB,disk:{tmp_path}?capacity=8MiB&patience=60s"
    store = open_backend(url)
    keys = kit.keys("replaced", count=6)
    async with kit.opened(store):
        assert await store.save(kit.chain(keys)) == 6
        memory, disk = store.inner.tiers
        block = memory.guard.inner._blocks.index.get(keys[3])
        memory.guard.inner._blocks.region._bytes[
            block.units[0] * memory.guard.inner._blocks.region.unit + 99
        ] ^= 1
        into = kit.buffers(6)
        assert await store.load(keys, into) == 6
        assert all(kit.holds(b, key) for b, key in zip(into, keys, strict=True))
        await written(store.inner)
        assert await memory.lookup(keys) == 6  # the sound copy has taken its place
        assert await disk.lookup(keys) == 6


# ------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("tiered:", "tiers is needed, as in tiered:"),
        ("tiered:?tiers=memory:,,memory:", "one of them is empty"),
        ("tiered:?tiers=memory:&wirte=behind", "unknown parameter 'wirte'; did you mean 'write'"),
        ("tiered:?tiers=memory:&write=behnd", "write=behnd: unknown; did you mean 'behind'"),
        ("tiered:?tiers=memory:&write=behind", "write at least one through"),
        ("tiered:?tiers=memory:,memory:&write=through,behind,behind", "3 for 2 tiers"),
        ("tiered:?tiers=memry:", "store scheme 'memry' is unknown; did you mean 'memory'"),
        ("tiered:?tiers=memory:?capacty=1", "unknown parameter 'capacty'"),
        ("tiered:?tiers=tiered:", "cannot be tiered itself"),
        ("tiered:/x?tiers=memory:", "has no place of its own"),
        ("tiered:?tiers=memory:&patience=fast", "patience=fast: a duration"),
        ("tiered:?tiers=memory:&queue=0", "queue=0: must be at least one byte"),
        ("tiered:?tiers=memory:&promote=maybe", "promote=maybe: unknown"),
        ("tiered:?tiers=" + ",".join(["memory:"] * 9), "9 are given; 1 to 8"),
    ],
)
def test_a_bad_url_says_what_is_wrong(url, message):
    with pytest.raises(ConfigurationError, match=message.replace("?", r"\?")):
        open_backend(url)


def test_password_of_a_tier_is_not_shown():
    with pytest.raises(ConfigurationError) as refused:
        open_backend("tiered:?tiers=x://me:secret@host/&wirte=behind")
    assert "secret" not in str(refused.value)
    assert "me:***@host" in str(refused.value)


@pytest.mark.parametrize("comma", ["%2C", "%2c", "%252C"])
def test_a_comma_within_a_tiers_url_is_percent_encoded(comma):
    url = (
        f"tiered:?tiers=memory:?capacity=1MiB,redis%2Bcluster://n1:7001{comma}n2:7002/?prefix=a:b"
        f",nixl://a:1{comma}b:2,disk:/var/a{comma}b&write=through"
    )
    tiers, settings = parse_tiered(parsed := StoreUrl.parse(url))
    assert tiers == [
        "memory:?capacity=1MiB",
        "redis+cluster://n1:7001,n2:7002/?prefix=a:b",
        "nixl://a:1,b:2",
        "disk:/var/a,b",
    ]
    assert settings.write == ("through",)
    for shown in (str(parsed), without_passwords(url)):
        assert "redis+cluster://n1:7001%2Cn2:7002/?prefix=a:b,nixl://a:1%2Cb:2" in shown


async def test_wrong_tier_is_named(kit, tmp_path):
    (tmp_path / "file").touch()
    store = open_backend(f"tiered:?tiers=memory:?capacity=1MiB,disk:{tmp_path}/file")
    with pytest.raises(ConfigurationError, match=r"tier disk: .* is not a directory"):
        await store.open([kit.layout])
    await store.close()


async def test_closed_store_refuses_calls(kit):
    async with tiered(DictTier()) as store:
        pass
    for call in (store.lookup([]), store.load([], []), store.save([]), store.delete([])):
        with pytest.raises(BackendUnavailable, match="not open"):
            await call
