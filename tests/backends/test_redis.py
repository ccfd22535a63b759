"""The Redis store on one real server: parts, lifetime, refusals, damage, the index of tails."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from urllib.parse import quote

import pytest
import redis
import torch
from redis_faults import load
from redis_server import RedisServer

from kvconnect.backend import MAX_CHILDREN
from kvconnect.backends import open_backend
from kvconnect.backends.redis import router as redis_router
from kvconnect.backends.redis.format import MAX_VALUE_NBYTES, Names
from kvconnect.errors import BackendUnavailable
from kvconnect.trace import metrics

MIB = 1 << 20
SPLIT = 9 * MIB + 17  # five values


@pytest.fixture
async def make_store(make_redis, redis_server):
    return partial(make_redis, redis_server)


@pytest.fixture
async def store(make_store):
    return await make_store()


@pytest.fixture
def names(prefix):
    return Names(prefix.encode())


async def test_a_socket_of_this_machine_does_as_well(tmp_path, kit):
    path = tmp_path / "socket"
    server = RedisServer(tmp_path / "redis", "--unixsocket", str(path), "--requirepass", "secret")
    server.admin = redis.Redis(port=server.port, password="secret", retry=None)
    server.start()
    keys = [kit.key(number) for number in range(3)]
    try:
        one, other = (
            open_backend(f"redis+unix://:secret@{path}?db={db}&ttl=1h").inner for db in (0, 1)
        )
        await one.open([kit.layout])
        await other.open([kit.layout])
        blocks = [kit.block(key, nbytes=SPLIT) for key in keys]
        assert await one.save(blocks) == 3
        assert await other.lookup(keys) == 0
        assert all([await load(one, kit, [key], SPLIT) for key in keys])
        server.stop()
        with pytest.raises(BackendUnavailable, match=str(path)):
            await one.lookup(keys)
        await one.close()
        await other.close()
    finally:
        server.stop()


@pytest.mark.parametrize("nbytes", [4 * MIB - 200, 4 * MIB, SPLIT])
async def test_no_value_is_above_four_mebibytes_or_expires(
    store, kit, redis_server, prefix, nbytes
):
    key = kit.key(nbytes)
    assert await store.save([kit.block(key, nbytes=nbytes)]) == 1
    assert await store.lookup([key]) == 1
    assert await load(store, kit, [key], nbytes)
    names = redis_server.names(prefix)
    assert {redis_server.admin.pttl(name) for name in names} == {-1}
    lengths = [redis_server.admin.strlen(name) for name in names]
    assert max(lengths) <= MAX_VALUE_NBYTES
    assert sum(lengths) < nbytes + 200
    await store.delete([key])
    assert redis_server.names(prefix) == []


@pytest.mark.parametrize("nbytes", [100, SPLIT])
async def test_buffers_longer_than_a_value_are_filled_and_shorter_ones_left_alone(
    store, kit, nbytes
):
    key = kit.key("length", nbytes)
    await store.save([kit.block(key, nbytes=nbytes)])
    short, long = kit.buffer(nbytes - 1), kit.buffer(nbytes + 5000)
    assert await store.load([key], [short]) == 0
    assert kit.untouched(short)
    assert await store.load([key], [long]) == 1
    assert torch.equal(long[:nbytes], kit.content(key, nbytes))
    assert kit.untouched(long[nbytes:])


@pytest.mark.parametrize("nbytes", [100, SPLIT])
@pytest.mark.parametrize(
    ("stores", "own", "kept"), [(None, 60, 60), ("1h", 60, 60), ("1m", 90, 60)]
)
async def test_a_block_has_a_time_of_its_own(
    make_store, kit, redis_server, prefix, nbytes, stores, own, kept
):
    """Its other values outlive it a little; without it they stay for ever."""
    store = await make_store(**({} if stores is None else {"ttl": stores}))
    mine, plain = kit.key("own", nbytes, stores), kit.key("plain", nbytes, stores)
    blocks = [kit.block(key, nbytes=nbytes) for key in (mine, plain)]
    assert await store.save([replace(blocks[0], expires_at=time.time() + own), blocks[1]]) == 2
    ttls = {name: redis_server.admin.pttl(name) for name in redis_server.names(prefix)}
    of_mine = [ttl for name, ttl in ttls.items() if mine.hex() in name]
    assert ttls[f"{prefix}b:{mine.hex()}"] <= 1000 * kept
    assert len(of_mine) == (1 if nbytes == 100 else 5)
    assert all(1000 * (kept - 30) < ttl <= 1000 * (kept + 60) for ttl in of_mine)
    if stores is None:
        assert {ttl for name, ttl in ttls.items() if plain.hex() in name} == {-1}


async def test_writer_that_dies_before_the_end_leaves_no_block_and_nothing_for_ever(
    make_store, kit, redis_server, prefix, names
):
    dying, other = await make_store(), await make_store()
    key = kit.key("dying")
    run = dying._parts.router.run

    async def until_the_last(work, items, kind):
        if kind == "store" and any(one.name == names.block(key) for one in items):
            raise BackendUnavailable("killed")
        return await run(work, items, kind)

    dying._parts.router.run = until_the_last
    with pytest.raises(BackendUnavailable):
        await dying.save([kit.block(key, nbytes=SPLIT)])
    assert await other.lookup([key]) == 0
    left = redis_server.names(prefix)
    assert len(left) == 4
    assert all(0 < redis_server.admin.ttl(name) <= 600 for name in left)
    assert await other.save([kit.block(key, nbytes=SPLIT)]) == 1
    assert await load(other, kit, [key], SPLIT)


async def test_faster_writer_wins_and_the_other_leaves_no_parts(
    make_store, kit, redis_server, prefix
):
    slow, fast = await make_store(), await make_store()
    key = kit.key("race")
    run = slow._parts.router.run

    async def after_the_fast(work, items, kind):
        result = await run(work, items, kind)
        if kind == "store" and len(items) > 1:  # the parts
            await fast.save([kit.block(key, nbytes=SPLIT)])
        return result

    slow._parts.router.run = after_the_fast
    assert await slow.save([kit.block(key, nbytes=SPLIT)]) == 1
    assert len(redis_server.names(prefix)) == 5
    assert await load(slow, kit, [key], SPLIT)


@pytest.mark.parametrize(("part", "loaded"), [(1, True), (4, True), (2, False)])
async def test_block_without_one_of_its_parts_is_a_miss_and_can_be_saved_again(
    store, kit, redis_server, prefix, part, loaded
):
    key, before = kit.keys("evicted", count=2)
    await store.save([kit.block(before, nbytes=SPLIT), kit.block(key, nbytes=SPLIT)])
    gone = [n for n in redis_server.names(f"{prefix}p:{key.hex()}") if n.endswith(f":{part}")]
    assert redis_server.admin.delete(*gone) == 1
    assert await store.lookup([before, key]) == 1
    if loaded:
        into = [kit.buffer(SPLIT), kit.buffer(SPLIT)]
        assert await store.load([before, key], into) == 1
        assert kit.holds(into[0], before, framed=False)
        assert redis_server.names(f"{prefix}b:{key.hex()}") == []
    assert await store.save([kit.block(key, nbytes=SPLIT)]) == 1
    assert await load(store, kit, [key], SPLIT)
    assert len(redis_server.names(prefix)) == 10


def truncated(admin, name, nbytes):
    admin.set(name, admin.get(name)[:nbytes])


DAMAGE = {
    "empty": lambda admin, name: admin.set(name, b""),
    "garbage": lambda admin, name: admin.set(name, b"x" * 5000),
    "cut": lambda admin, name: truncated(admin, name, -1),
    "cut in the head": lambda admin, name: truncated(admin, name, 10),
    "longer": lambda admin, name: admin.append(name, b"x"),
    "a list": lambda admin, name: (admin.delete(name), admin.rpush(name, b"x")),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("nbytes", [4000, SPLIT])
async def test_damaged_value_is_never_a_hit_and_replaced(
    store, kit, redis_server, prefix, damage, nbytes
):
    key = kit.key("damaged")
    await store.save([kit.block(key, nbytes=nbytes)])
    damage(redis_server.admin, f"{prefix}b:{key.hex()}")
    buffer = kit.buffer(nbytes + 5000)
    assert await store.load([key], [buffer]) == 0
    assert kit.untouched(buffer)
    assert await store.lookup([key]) == 0
    assert await store.save([kit.block(key, nbytes=nbytes)]) == 1
    assert await load(store, kit, [key], nbytes)


async def test_saving_replaces_what_is_no_block(store, kit, redis_server, prefix):
    key = kit.key("replaced")
    for name in ("garbage", "a list"):
        DAMAGE[name](redis_server.admin, f"{prefix}b:{key.hex()}")
        assert await store.save([kit.block(key, nbytes=4000)]) == 1
        assert await load(store, kit, [key], 4000)


async def test_full_server_stores_what_fits_and_goes_on_when_there_is_room(kit, own_redis):
    store = open_backend(f"{own_redis.url}?connections=1").inner
    await store.open([])
    try:
        own_redis.admin.config_set("maxmemory", "20mb")
        parted = [kit.block(key, nbytes=SPLIT) for key in kit.keys("parted", count=4)]
        saved = await store.save(parted)
        assert 0 < saved < 4
        assert len(own_redis.names("kvconnect:")) == 5 * saved  # no parts of the others
        assert await load(store, kit, [parted[0].key], SPLIT)
        await store.delete([block.key for block in parted])
        keys = kit.keys("full", count=40)
        blocks = [kit.block(key, nbytes=MIB) for key in keys]
        saved = await store.save(blocks)
        assert 5 < saved < 25
        assert (await store.stats())["maxmemory"] == 20 * MIB
        assert await store.lookup(keys) >= saved
        assert all([await load(store, kit, [key], MIB) for key in keys[:saved]])
        refused = metrics.snapshot()["redis.refused"]
        received = own_redis.admin.info()["total_net_input_bytes"]
        assert await store.save(blocks[saved:]) == 0
        assert await store.save(parted[:1]) == 0
        assert own_redis.admin.info()["total_net_input_bytes"] - received < 100_000
        assert await store.save(blocks[:2]) == 2
        assert metrics.snapshot()["redis.refused"] > refused
        await store.delete(keys[:10])
        assert await store.save(blocks[:2]) == 2
        own_redis.admin.config_set("maxmemory", "0")
        assert await store.save(blocks) == 40
    finally:
        await store.close()


async def test_children_are_the_newest_of_very_many(store, kit, redis_server, prefix):
    parent = kit.key("popular")
    keys = kit.keys("child", count=MAX_CHILDREN + 50)
    for start in range(0, len(keys), 100):
        await store.save(
            [kit.block(k, parent, nbytes=10, tokens=[1, 2]) for k in keys[start : start + 100]]
        )
    found = await store.children(parent)
    assert [child.key for child in found[:10]] == keys[:-11:-1]
    assert {child.key for child in found} == set(keys[-MAX_CHILDREN:])
    index = f"{prefix}c:{parent.hex()}"
    assert redis_server.admin.zcard(index) == MAX_CHILDREN
    assert 0 < redis_server.admin.ttl(index) <= 30 * 86400


async def test_children_that_are_gone_leave_the_index(store, kit, redis_server, prefix):
    parent, one, other = kit.keys("gone", count=3)
    await store.save([kit.block(k, parent, nbytes=10, tokens=[7]) for k in (one, other)])
    await store.delete([one])
    assert [child.key for child in await store.children(parent)] == [other]
    assert redis_server.admin.zcard(f"{prefix}c:{parent.hex()}") == 1


async def test_damaged_index_lists_what_is_sound(store, kit, redis_server, prefix):
    parent, one = kit.keys("damaged index", count=2)
    await store.save([kit.block(one, parent, nbytes=10, tokens=[7])])
    redis_server.admin.zadd(f"{prefix}c:{parent.hex()}", {b"junk": 9e9, b"k" * 33: 9e9})
    assert [child.key for child in await store.children(parent)] == [one]


@pytest.mark.parametrize("special", ["", "*[?"])
async def test_scan_and_stats_see_their_own_prefix_only(
    make_store, kit, redis_server, prefix, special
):
    store = await make_store(prefix=quote(prefix := special + prefix))
    redis_server.admin.set(f"{prefix}b:junk", b"x")
    redis_server.admin.set(f"{prefix}b:{kit.key('empty').hex()}", b"")
    redis_server.admin.set(f"{prefix[:-1]}x:b:{kit.key('other').hex()}", b"x")
    redis_server.admin.set(f"x{prefix}b:{kit.key('another').hex()}", b"x")
    key = kit.key("mine")
    await store.save([kit.block(key, nbytes=10)])
    assert [entry.key async for entry in store.scan()] == [key]
    assert (await store.stats())["blocks"] == 2  # the empty one too


async def test_lookup_counts_as_use(store, kit, redis_server, prefix):
    key = kit.key("used")
    await store.save([kit.block(key, nbytes=SPLIT)])
    with redis_server.configured(maxmemory_policy="allkeys-lfu"):
        entries = [entry async for entry in store.scan()]  # such servers tell no idle time
        assert entries[0].used_at == entries[0].created_at
        values = redis_server.names(prefix)
        before = [redis_server.admin.object("freq", name) for name in values]
        for _ in range(50):
            await store.lookup([key])
        after = [redis_server.admin.object("freq", name) for name in values]
    assert all(late > early for early, late in zip(before, after, strict=True))


async def test_long_lookup_stops_where_the_first_is_absent(store, kit):
    keys = kit.keys("long", count=1500)
    blocks = [kit.block(key, nbytes=1) for key in keys]
    assert await store.save(blocks) == 1500
    assert await store.lookup(keys) == 1500
    await store.delete([keys[700]])
    assert await store.lookup(keys) == 700


async def test_several_connections_move_one_batch(make_redis, own_redis, kit, monkeypatch):
    monkeypatch.setattr(redis_router, "_STRIPE_NBYTES", 8 * MIB)
    store, admin = await make_redis(own_redis, connections=3), own_redis.admin
    keys = kit.keys("stripes", count=30)
    admin.client_pause(60_000, all=False)  # what writes waits for its answer
    saving = asyncio.ensure_future(store.save([kit.block(key, nbytes=MIB) for key in keys]))
    while len(admin.client_list()) < 3 + 1:
        assert not saving.done()
        await asyncio.sleep(0.01)
    admin.client_unpause()
    assert await saving == 30
    into = [kit.buffer(MIB) for _ in keys]
    assert await store.load(keys, into) == 30
    assert all(kit.holds(b, key, framed=False) for b, key in zip(into, keys, strict=True))
    await store.delete([keys[20]])
    assert await store.load(keys, into) == 20
