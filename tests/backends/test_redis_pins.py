"""Pins of Redis stores, beyond what the kit checks: full servers, expiry, other processes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from math import inf

import numpy as np
import pytest

from kvconnect.backends import open_backend
from kvconnect.backends.redis import save
from kvconnect.errors import ConfigurationError
from kvconnect.testing.faults.clock import ShiftedClock

NBYTES = 100_000
HOUR_S = 3600.0


def a_chain(kit, name, count, nbytes=NBYTES):
    keys = [kit.key(name, number) for number in range(count)]
    return [
        kit.block(key, before, nbytes=nbytes)
        for key, before in zip(keys, [None, *keys], strict=False)
    ]


def keys_of(blocks):
    return [one.key for one in blocks]


async def there(store, blocks):
    return [await store.lookup([one.key]) == 1 for one in blocks]


async def press(store, kit, count, name="press"):
    return sum([await store.save(a_chain(kit, (name, n), 1)) for n in range(count)])


def limited(server, policy, nbytes=8 << 20):
    """So many bytes of blocks, beyond what the server has without any."""
    used = server.admin.info("memory")["used_memory"]
    return server.configured(maxmemory=str(used + nbytes), maxmemory_policy=policy)


@pytest.mark.parametrize("parts", [1, 3])
async def test_pinned_blocks_survive_ten_times_the_capacity_and_other_processes(
    own_redis, make_redis, kit, parts
):
    mine = a_chain(kit, "mine", 3, NBYTES if parts == 1 else 5 << 20)
    capacity = (8 if parts == 1 else 32) << 20
    with limited(own_redis, "volatile-lru", capacity):
        store = await make_redis(own_redis, ttl="1h", pin_fraction=0.9)
        assert await store.save(mine) == 3
        command = await make_redis(own_redis)
        assert await command.pin(keys_of(mine), inf) == [True] * 3
        await command.close()
        others = 10 * capacity // NBYTES
        assert await press(store, kit, others) == others
        assert all(await there(store, mine))
        assert (await store.stats())["pinned_blocks"] == 3
        assert await store.pin(keys_of(mine), None) == [True] * 3
        for number in range(100):  # the server drops by samples
            await press(store, kit, 100, ("more", number))
            if not any(await store.describe(keys_of(mine))):
                break
        else:
            pytest.fail("an unpinned block is never dropped")


async def test_without_room_for_others_pinned_blocks_stay(own_redis, make_redis, kit):
    """With noeviction nothing is dropped, so new blocks are refused."""
    mine = a_chain(kit, "mine", 5)
    with limited(own_redis, "noeviction"):
        store = await make_redis(own_redis)
        await store.save(mine)
        assert await store.pin(keys_of(mine), inf) == [True] * 5
        assert await press(store, kit, 200) < 200
        assert all(await there(store, mine))


async def test_a_server_that_drops_any_key_is_refused_by_a_sentence(own_redis, make_redis, kit):
    mine = a_chain(kit, "mine", 2)
    store = await make_redis(own_redis)
    await store.save(mine)
    with limited(own_redis, "allkeys-lru"):
        with pytest.raises(ConfigurationError, match=r"allkeys-lru it drops any key.*volatile-lru"):
            await store.pin(keys_of(mine), inf)
        with pytest.raises(ConfigurationError, match="allkeys-lru"):
            await store.pin([], inf)
        assert await store.pin(keys_of(mine), None) == [False, False]
        assert (await store.stats())["pinned_blocks"] == 0
    with own_redis.configured(maxmemory_policy="allkeys-lru"):  # drops nothing without a limit
        assert await store.pin(keys_of(mine), inf) == [True, True]


async def test_a_pin_ends_at_its_time_and_the_block_expires_as_if_it_had_none(
    own_redis, make_redis, kit
):
    short, long = a_chain(kit, "short", 1), a_chain(kit, "long", 1, 5 << 20)
    store = await make_redis(own_redis, ttl="2h")
    with ShiftedClock() as clock:
        await store.save(short + long)
        until = time.time() + HOUR_S
        assert await store.pin(keys_of(short), until) == [True]
        assert await store.pin(keys_of(long), until) == [True]
        names = own_redis.names("")
        pins = [name for name in names if name.endswith("pins")]
        values = [name for name in names if ":b:" in name or ":p:" in name]
        assert len(pins) == 1
        assert {own_redis.admin.ttl(name) for name in values} == {-1}
        await press(store, kit, 1)
        assert (await store.describe(keys_of(short)))[0].pinned_until == until
        clock.forward(1.1 * HOUR_S)
        assert (await store.describe(keys_of(short)))[0].pinned_until == 0
        assert (await store.stats())["pinned_blocks"] == 0
        assert {own_redis.admin.ttl(name) for name in values} == {-1}, "describe leaves no trace"
        await press(store, kit, 1, "after")
        assert all(7000 < own_redis.admin.ttl(name) <= 7260 for name in values)
        assert not own_redis.admin.exists(pins[0])
        assert all(await there(store, short + long))


@pytest.mark.parametrize("nbytes", [NBYTES, 5 << 20])
async def test_a_pin_that_outlived_the_expiry_ends_on_time_before_any_process_writes(
    own_redis, make_redis, kit, nbytes
):
    before, mine, after = (a_chain(kit, name, 1, nbytes)[0] for name in ("before", "mine", "after"))
    with ShiftedClock() as clock:
        store = await make_redis(own_redis, ttl="2h")
        mine = replace(mine, tokens=np.arange(4, dtype=np.int32))
        assert await store.save([before, mine, after]) == 3
        keys = [before.key, mine.key, after.key]
        assert await store.pin(keys[1:2], time.time() + 3 * HOUR_S) == [True]
        reader = await make_redis(own_redis)
        clock.forward(2.5 * HOUR_S)  # the server's own clock goes on as before
        assert await reader.lookup(keys) == 3
        clock.forward(0.6 * HOUR_S)
        assert await reader.lookup(keys) == await store.lookup(keys) == 1
        assert await reader.lookup(keys[2:]) == 1
        assert [one is None for one in await reader.describe(keys)] == [False, True, False]
        assert [entry.key async for entry in reader.scan()].count(mine.key) == 0
        assert await reader.children(None) == []
        (name,) = (one for one in own_redis.names("") if f":b:{mine.key.hex()}" in one)
        assert own_redis.admin.ttl(name) == -1, "nothing was written"
        assert await store.save([mine]) == 1
        (anew,) = await reader.describe([mine.key])
        assert time.time() - anew.created_at < HOUR_S / 2
        assert 7000 < own_redis.admin.ttl(name) <= 7200
        assert await reader.lookup(keys) == 3


async def test_an_expiry_that_passed_meanwhile_ends_with_the_pin(own_redis, make_redis, kit):
    mine = a_chain(kit, "mine", 2)
    store = await make_redis(own_redis, ttl="500ms")
    await store.save(mine)
    assert await store.pin(keys_of(mine)[:1], inf) == [True]
    while await there(store, mine[1:]) == [True]:
        pass
    assert await there(store, mine) == [True, False]
    other = await make_redis(own_redis)  # its URL has no ttl: the pin knows
    assert await other.pin(keys_of(mine), None) == [True, False]
    assert await there(store, mine) == [False, False]


async def test_pins_take_their_share_only_also_of_two_at_once(own_redis, make_redis, kit):
    mine, yours = a_chain(kit, "mine", 30), a_chain(kit, "yours", 30)
    with limited(own_redis, "volatile-lru"):
        limit = 0.25 * int(own_redis.admin.config_get("maxmemory")["maxmemory"])
        one = await make_redis(own_redis, ttl="1h", pin_fraction=0.25)
        two = await make_redis(own_redis, ttl="1h", pin_fraction=0.25)
        await one.save(mine + yours)
        answers = await asyncio.gather(one.pin(keys_of(mine), inf), two.pin(keys_of(yours), inf))
        stats = await one.stats()
        assert stats["pinned_bytes"] <= limit
        assert stats["pinned_blocks"] == sum(map(sum, answers))
        for pinned in answers:
            assert pinned == sorted(pinned, reverse=True), "the beginnings first"
        again = await one.pin(keys_of(mine + yours), inf)
        assert limit - NBYTES * 1.1 < (await one.stats())["pinned_bytes"] <= limit
        assert 0 < sum(again) < 60


async def test_a_save_that_is_second_leaves_a_pinned_block_without_expiry(
    own_redis, make_redis, kit, monkeypatch
):
    """It looked for the block, found none, and sends its value when that is stored and pinned."""
    mine = a_chain(kit, "mine", 1)
    one, two = await make_redis(own_redis), await make_redis(own_redis)
    loop, plain = asyncio.get_running_loop(), save._found_there

    async def save_and_pin():
        assert await two.save(mine) == 1
        assert await two.pin(keys_of(mine), inf) == [True]

    def found_there(reply):
        monkeypatch.undo()
        asyncio.run_coroutine_threadsafe(save_and_pin(), loop).result(30)
        return plain(reply)

    monkeypatch.setattr(save, "_found_there", found_there)
    assert await one.save([replace(mine[0], expires_at=time.time() + 60.0)]) == 1
    (name,) = (name for name in own_redis.names("") if ":b:" in name)
    assert own_redis.admin.ttl(name) == -1
    assert await two.pin(keys_of(mine), None) == [True]
    assert own_redis.admin.ttl(name) == -1


async def test_a_deleted_block_is_not_pinned_when_it_is_saved_again(own_redis, make_redis, kit):
    mine = a_chain(kit, "mine", 1)
    store = await make_redis(own_redis, ttl="1h")
    await store.save(mine)
    await store.pin(keys_of(mine), inf)
    await store.delete(keys_of(mine))
    await store.save(mine)
    assert (await store.stats())["pinned_blocks"] == 0
    assert await store.pin(keys_of(mine), None) == [False]
    (name,) = (name for name in own_redis.names("") if ":b:" in name)
    assert 0 < own_redis.admin.ttl(name) <= 3600


async def test_a_pin_whose_process_was_killed_is_repeated(own_redis, make_redis, kit):
    """Killed between the record and the end of the expiry, and the other way round of an unpin."""
    mine = a_chain(kit, "mine", 1)
    store = await make_redis(own_redis, ttl="1h")
    await store.save(mine)
    await store.pin(keys_of(mine), inf)
    (name,) = (name for name in own_redis.names("") if ":b:" in name)
    own_redis.admin.pexpire(name, 3_000_000)
    assert await store.pin(keys_of(mine), inf) == [True]
    assert own_redis.admin.ttl(name) == -1
    assert await store.pin(keys_of(mine), None) == [True]
    assert 2900 < own_redis.admin.ttl(name) <= 3000


async def test_pins_are_those_of_the_server_after_a_restart(own_redis, make_redis, kit):
    mine = a_chain(kit, "mine", 3)
    store = await make_redis(own_redis, ttl="1h")
    await store.save(mine)
    await store.pin(keys_of(mine)[:2], inf)
    own_redis.admin.save()
    own_redis.stop()
    own_redis.start()
    again = await make_redis(own_redis, ttl="1h")
    found = [entry.pinned_until for entry in await again.describe(keys_of(mine))]
    assert found == [inf, inf, 0.0]


async def test_junk_among_the_pins_is_none(own_redis, make_redis, kit):
    mine = a_chain(kit, "mine", 1)
    store = await make_redis(own_redis)
    await store.save(mine)
    await store.pin(keys_of(mine), inf)
    (pins,) = (name for name in own_redis.names("") if name.endswith("pins"))
    own_redis.admin.hset(pins, mapping={mine[0].key: b"x", b"short": b"y"})
    assert (await store.describe(keys_of(mine)))[0].pinned_until == 0.0
    assert await store.pin(keys_of(mine), inf) == [True]


async def test_a_tiered_store_pins_in_the_tiers_that_can(own_redis, prefix, kit, tmp_path):
    url = f"tiered:?tiers=disk:{tmp_path}/kv,{own_redis.url}%3Fprefix={prefix}"
    mine = a_chain(kit, "mine", 2)
    store = open_backend(url, raw=True)
    await store.open([])
    try:
        assert await store.save(mine) == 2
        with limited(own_redis, "allkeys-lru"):
            assert await store.pin(keys_of(mine), inf) == [True, True]
            stats = await store.stats()
            assert (stats["disk.pinned_blocks"], stats["redis.pinned_blocks"]) == (2, 0)
        assert await store.pin(keys_of(mine), inf) == [True, True]
        assert (await store.stats())["redis.pinned_blocks"] == 2
        assert await store.pin(keys_of(mine), None) == [True, True]
    finally:
        await store.close()


async def test_a_value_of_another_type_in_place_of_the_pins_holds_none(own_redis, make_redis, kit):
    mine = a_chain(kit, "mine", 3)
    store = await make_redis(own_redis)
    await store.save(mine)
    await store.pin(keys_of(mine), inf)
    (pins,) = (name for name in own_redis.names("") if name.endswith("pins"))
    own_redis.admin.set(pins, b"junk")
    found = await store.describe(keys_of(mine))
    assert [entry.pinned_until for entry in found] == [0.0] * 3
    assert (await store.stats())["pinned_blocks"] == 0
    assert len([entry async for entry in store.scan()]) == 3
    assert await store.pin(keys_of(mine), None) == [False] * 3
    await store.delete(keys_of(mine)[:1])
    assert await there(store, mine) == [False, True, True]
    assert await store.save(mine) == 3
    assert await store.pin(keys_of(mine), inf) == [True] * 3
    assert (await store.stats())["pinned_blocks"] == 3
