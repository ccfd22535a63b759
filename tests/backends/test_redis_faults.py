"""A Redis server that freezes, dies, lies or is cut off: an error in time, and right afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time

import pytest
from redis_faults import Relay, Script, answered, load
from redis_server import until

from kvconnect.backends.redis.format import Head
from kvconnect.errors import BackendUnavailable

MIB = 1 << 20


@pytest.fixture
def relay(redis_server):
    made = Relay(redis_server.port)
    yield made
    made.close()


def own_threads():
    return [one for one in threading.enumerate() if one.name.startswith("kvconnect-redis")]


OPERATIONS = {
    "lookup": lambda store, kit, keys: store.lookup(keys),
    "load": lambda store, kit, keys: store.load(keys, [kit.buffer(MIB) for _ in keys]),
    "save": lambda store, kit, keys: store.save([kit.block(kit.key("new"), nbytes=MIB)]),
    "delete": lambda store, kit, keys: store.delete([kit.key("absent")]),
    "children": lambda store, kit, keys: store.children(keys[0]),
    "stats": lambda store, kit, keys: store.stats(),
}


async def test_frozen_server_is_given_up_and_works_when_it_thaws(make_redis, kit, own_redis):
    store = await make_redis(own_redis, timeout="300ms")
    keys = kit.keys("frozen", count=3)
    blocks = [kit.block(key, nbytes=MIB) for key in keys]
    assert await answered(lambda: store.save(blocks)) == 3
    with own_redis.frozen():
        start = time.monotonic()
        calls = (operation(store, kit, keys) for operation in OPERATIONS.values())
        for result in await asyncio.gather(*calls, return_exceptions=True):
            with pytest.raises(BackendUnavailable, match="no answer"):
                raise result
        assert time.monotonic() - start < 30
    assert await answered(lambda: load(store, kit, keys, MIB)) == 3
    assert await answered(lambda: store.lookup(keys)) == 3


async def test_closing_ends_calls_in_flight_and_every_thread(kit, own_redis, make_redis):
    store = await make_redis(own_redis, timeout="120s")
    keys = kit.keys("closing", count=8)
    await store.save([kit.block(key, nbytes=MIB) for key in keys])
    own_redis.freeze()
    try:
        calls = [
            asyncio.ensure_future(call)
            for key in keys
            for call in (store.lookup([key]), store.load([key], [kit.buffer(MIB)]))
        ]
        await asyncio.sleep(0.1)
        start = time.monotonic()
        await store.close()
        assert time.monotonic() - start < 60  # half of what a call may take
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, BackendUnavailable) for result in results)
    finally:
        own_redis.thaw()
    port = str(own_redis.port)
    until(lambda: not any(port in one.name for one in own_threads()), "the end of all threads")


async def test_server_killed_while_blocks_are_saved_has_whole_ones_or_none(
    kit, own_redis, make_redis
):
    own_redis.stop()
    # With everysec a server answers before it has written, while the disk is busy.
    own_redis.command += ["--appendonly", "yes", "--appendfsync", "no"]
    own_redis.start()
    store = await make_redis(own_redis)
    acknowledged, enough = [], asyncio.Event()

    async def save_until_it_dies():
        for number in range(1000):
            key = kit.key("dying", number)
            if await store.save([kit.block(key, nbytes=5 * MIB)]):
                acknowledged.append(key)
            if number == 3:
                enough.set()

    saving = asyncio.ensure_future(save_until_it_dies())
    async with asyncio.timeout(60):
        await enough.wait()
    own_redis.stop()
    with pytest.raises(BackendUnavailable):
        await saving
    own_redis.start()
    for key in acknowledged:
        assert await load(store, kit, [key], 5 * MIB) == 1
    await load(store, kit, [kit.key("dying", len(acknowledged))], 5 * MIB)


async def test_connection_that_died_idle_costs_nothing(kit, relay, make_redis):
    store = await make_redis(relay)
    key = kit.key("idle")
    await store.save([kit.block(key, nbytes=MIB)])
    assert await store.lookup([key]) == 1
    relay.cut()
    await asyncio.sleep(0.05)
    assert await store.lookup([key]) == 1
    assert await load(store, kit, [key], MIB) == 1


async def test_trickle_is_given_up_although_it_never_stops(kit, relay, make_redis):
    store = await make_redis(relay, timeout="300ms")
    keys = kit.keys("trickle", count=30)
    blocks = [kit.block(key, nbytes=5000) for key in keys]
    assert await answered(lambda: store.save(blocks)) == 30
    into = [kit.buffer(50_000) for _ in keys]
    relay.step, relay.pause = 10, 0.02
    for call in (store.lookup(keys), store.load(keys, into)):
        start = time.monotonic()
        # One that was given up on a busy machine is made anew, and trickles from its first answer.
        with pytest.raises(BackendUnavailable, match=r"less than 16 KiB|no answer for 0\.3 s"):
            await call
        assert time.monotonic() - start < 30
    relay.step, relay.pause = 1 << 20, 0
    assert await answered(lambda: store.lookup(keys)) == 30


async def test_server_that_reads_slowly_is_given_up(kit, relay, make_redis):
    store = await make_redis(relay, timeout="300ms")
    relay.reads = 1000
    start = time.monotonic()
    with pytest.raises(BackendUnavailable, match="less than 16 KiB"):
        await store.save([kit.block(key, nbytes=3 * MIB) for key in kit.keys("slow", count=20)])
    assert time.monotonic() - start < 30


async def test_server_that_cannot_persist_or_became_a_replica_takes_no_blocks(
    kit, own_redis, make_redis
):
    store = await make_redis(own_redis)
    keys, admin = kit.keys("refused", count=3), own_redis.admin
    admin.config_set("save", "3600 1")
    (own_redis.folder / "dump.rdb").mkdir()  # there is no way to write it
    admin.set("x", "y")
    admin.bgsave()
    until(lambda: admin.info("persistence")["rdb_last_bgsave_status"] == "err", "the failure")
    assert await store.save([kit.block(keys[0], nbytes=MIB)]) == 0
    admin.config_set("save", "")
    assert await store.save([kit.block(keys[0], nbytes=MIB, tokens=[1])]) == 1
    admin.replicaof("127.0.0.1", "1")
    admin.config_set("replica-serve-stale-data", "yes")
    assert await store.save([kit.block(keys[1], nbytes=MIB, tokens=[1])]) == 0
    assert await load(store, kit, keys, MIB) == 1
    admin.replicaof("NO", "ONE")
    assert await store.save([kit.block(keys[1], nbytes=MIB)]) == 1


@pytest.fixture
def scripted():
    """A server that is a Redis until it is told what to say."""
    server = Script(lambda command: b"+PONG\r\n" if command[0] == b"PING" else b"$0\r\n\r\n")
    yield server
    server.close()


async def test_errors_are_errors_and_no_misses(kit, scripted, make_redis):
    store = await make_redis(scripted)
    for error in ("LOADING Redis is loading", "MASTERDOWN Link is down", "BUSY script", "ERR what"):
        scripted.answer = lambda _, error=error: f"-{error}\r\n".encode()
        for operation in OPERATIONS.values():
            with pytest.raises(BackendUnavailable, match=error.split()[1]):
                await operation(store, kit, [kit.key(1)])


async def test_server_that_sends_its_client_in_a_circle(kit, scripted, make_redis):
    store = await make_redis(scripted)
    scripted.answer = lambda _: b"-MOVED 1 127.0.0.1:%d\r\n" % scripted.port
    with pytest.raises(BackendUnavailable, match="without end"):
        await store.lookup([kit.key(1)])


async def test_server_that_sends_its_client_everywhere_makes_no_threads(kit, scripted, make_redis):
    store = await make_redis(scripted)
    ports = itertools.count(1)
    scripted.answer = lambda _: b"-MOVED 1 127.0.0.1:%d\r\n" % next(ports)
    before = set(own_threads())
    # The keys, and their pins.
    with pytest.raises(BackendUnavailable, match="sent to 201 others at once"):
        await store.lookup(kit.keys("everywhere", count=200))
    assert set(own_threads()) <= before


async def test_answers_of_another_kind_are_errors(kit, scripted, make_redis):
    store = await make_redis(scripted)
    for answer in (b":1\r\n", b"*0\r\n", b"$-1\r\n", b"+what\r\n"):
        scripted.answer = lambda _, answer=answer: answer
        for name in ("lookup", "children", "stats"):
            try:
                found = await OPERATIONS[name](store, kit, [kit.key(1)])
            except BackendUnavailable:
                continue
            assert found in (0, [], ())


async def test_two_answers_to_one_question_are_noticed_before_the_next(kit, scripted, make_redis):
    store = await make_redis(scripted)
    key = kit.key(1)
    value = Head(0, 4, 4, b"nonce678", 1.0).pack() + b"evil"
    scripted.answer = lambda _: b"$%d\r\n%s\r\n" % (len(value), value) * 2
    for _ in range(3):
        with contextlib.suppress(BackendUnavailable):
            await store.load([key], [kit.buffer(4)])
    scripted.answer = lambda _: b"$-1\r\n"
    await asyncio.sleep(0.05)
    assert await store.load([key], [kit.buffer(4)]) == 0
