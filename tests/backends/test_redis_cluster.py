"""The Redis store on a real cluster of three nodes, and behind a real sentinel."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager

import pytest
from redis.asyncio.cluster import NodesManager
from redis.crc import key_slot
from redis_faults import answered, load
from redis_server import RedisGroup

from kvconnect.backends import open_backend
from kvconnect.errors import BackendUnavailable, ConfigurationError

MIB = 1 << 20


@pytest.fixture
async def store(redis_cluster, prefix):
    made = open_backend(f"{redis_cluster.url}?prefix={prefix}&timeout=60s").inner
    await made.open([])
    yield made
    await made.close()


async def test_blocks_and_their_parts_are_on_all_nodes(store, kit, redis_cluster, prefix):
    sizes = [100, 2 * MIB, 9 * MIB] * 5
    keys = kit.keys("spread", count=len(sizes))
    blocks = [kit.block(k, nbytes=n, tokens=[1]) for k, n in zip(keys, sizes, strict=True)]
    assert await store.save(blocks) == len(sizes)
    assert await store.lookup(keys) == len(sizes)
    assert await load(store, kit, keys, sizes) == len(sizes)
    assert len(await store.children(None)) == len(sizes)
    assert all(len(node.names(f"{prefix}b:")) >= 2 for node in redis_cluster.nodes)
    assert all(len(node.names(f"{prefix}p:")) >= 4 for node in redis_cluster.nodes)
    assert sorted([entry.key async for entry in store.scan()]) == sorted(keys)
    assert [entry.nbytes for entry in await store.describe(keys)] == sizes
    assert (await store.stats())["blocks"] == len(keys)
    await store.delete(keys)
    assert [name for name in redis_cluster.names(prefix) if f"{prefix}c:" not in name] == []


async def test_counts_are_of_leading_blocks_whatever_node_they_are_on(store, kit):
    keys = kit.keys("leading", count=12)
    await store.save([kit.block(key, nbytes=MIB) for key in (*keys[:5], *keys[6:])])
    assert await store.lookup(keys) == 5
    assert await load(store, kit, keys, MIB) == 5  # and touches no buffer behind


async def test_one_node_is_enough_to_find_the_others(redis_cluster, kit, prefix):
    port = redis_cluster.nodes[1].port
    with pytest.raises(ConfigurationError, match=rf"write redis\+cluster://127.0.0.1:{port}"):
        await open_backend(f"redis://127.0.0.1:{port}").inner.open([])
    store = open_backend(f"redis+cluster://127.0.0.1:1,127.0.0.1:{port}?prefix={prefix}").inner
    await store.open([])
    assert len(store._parts.router.topology.servers) == 3
    keys = kit.keys("found", count=6)
    assert await store.save([kit.block(key, nbytes=10) for key in keys]) == 6
    await store.close()


@contextmanager
def moving(cluster, name):
    """Begins to move the slot of `name`; gives where it is, where it goes, and how it gets there.

    Unless the slot was given away it stays where it was.
    """
    slot, source = key_slot(name.encode()), cluster.node_of(name)
    target = next(node for node in cluster.nodes if node is not source)
    ids = [node.admin.execute_command("CLUSTER MYID").decode() for node in (source, target)]
    target.admin.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[0])
    source.admin.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[1])
    try:
        yield (
            source,
            target,
            lambda: source.admin.execute_command(
                "MIGRATE", "127.0.0.1", target.port, name, 0, 5000
            ),
        )
    finally:
        for node in (source, target):
            node.admin.execute_command("CLUSTER SETSLOT", slot, "STABLE")


async def test_slot_that_moves_is_followed(store, kit, redis_cluster, prefix):
    key = kit.key("moving")
    name = f"{prefix}b:{key.hex()}"
    await store.save([kit.block(key, nbytes=MIB)])
    with moving(redis_cluster, name) as (_, target, migrate):
        assert await load(store, kit, [key], MIB) == 1  # not moved yet
        migrate()
        assert await load(store, kit, [key], MIB) == 1  # ASK
        assert await store.lookup([key]) == 1
        await store.delete([key])
        assert await store.save([kit.block(key, nbytes=MIB)]) == 1
        assert target.names(f"{prefix}b:") == [name]
        redis_cluster.give(key_slot(name.encode()), target)
        assert await load(store, kit, [key], MIB) == 1  # MOVED
        assert store._parts.router.topology.address_of(name.encode()).port == target.port
        assert len(store._parts.router.topology.servers) == 3
        await store.delete([key])
        assert await store.save([kit.block(key, nbytes=MIB)]) == 1
        assert target.names(f"{prefix}b:") == [name]
        await store.delete([key])
        assert await load(store, kit, [key], MIB) == 0


async def test_blocks_behind_one_that_moves_are_loaded_too(store, kit, redis_cluster, prefix):
    keys = kit.keys("behind", count=15)
    names = [f"{prefix}b:{key.hex()}" for key in keys]
    await store.save([kit.block(key, nbytes=1000) for key in keys])
    with moving(redis_cluster, names[2]) as (source, _, migrate):
        theirs = [k for k, n in zip(keys, names, strict=True) if redis_cluster.node_of(n) is source]
        migrate()
        assert await load(store, kit, keys, 1000) == len(keys)
        assert await load(store, kit, theirs, 1000) == len(theirs)
        await store.delete([keys[2]])
        at = theirs.index(keys[2])
        assert await load(store, kit, theirs, 1000) == at  # and nothing behind


async def test_opening_that_is_cancelled_leaves_no_connection(redis_cluster, monkeypatch):
    ask, connections = NodesManager.initialize, []

    async def ask_and_be_cancelled(self):
        await ask(self)
        nodes = (*self.nodes_cache.values(), *self.startup_nodes.values())
        connections.extend(one for node in nodes for one in node._connections)
        asyncio.get_running_loop().call_soon(opening.cancel)

    monkeypatch.setattr(NodesManager, "initialize", ask_and_be_cancelled)
    store = open_backend(redis_cluster.url).inner
    opening = asyncio.ensure_future(store.open([]))
    with pytest.raises(asyncio.CancelledError):
        await opening
    if left := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(left, timeout=60)
    assert connections
    assert not any(connection.is_connected for connection in connections)


async def test_frozen_node_holds_up_nobody_but_who_needs_it(store, kit, redis_cluster, prefix):
    keys = kit.keys("node", count=30)
    await store.save([kit.block(key, nbytes=1000) for key in keys])
    frozen = redis_cluster.node_of(store._parts.router.names.pins.decode())
    theirs, others = [], []
    for key in keys:
        there = redis_cluster.node_of(f"{prefix}b:{key.hex()}") is frozen
        (theirs if there else others).append(key)
    loop = asyncio.get_running_loop()
    with frozen.frozen():
        waiting = asyncio.ensure_future(store.lookup(theirs[:1]))
        await asyncio.sleep(0)
        start = loop.time()
        for _ in range(3):
            assert await store.lookup(others) == len(others)
            assert await load(store, kit, others, 1000) == len(others)
        assert loop.time() - start < 30  # half of what a call may take
        assert not waiting.done()
    assert await waiting == 1
    assert await store.lookup(keys) == 30


async def test_nobody_waits_for_news_of_the_cluster_while_the_old_will_do(store, kit):
    keys = kit.keys("news", count=9)
    await store.save([kit.block(key, nbytes=10) for key in keys])

    async def no_answer():
        await asyncio.sleep(3600)

    store._parts.router.topology.discover = no_answer
    store._parts.router.topology.suspect()
    async with asyncio.timeout(60):
        assert await store.lookup(keys) == 9
        assert await store.lookup(keys) == 9


@pytest.mark.parametrize("given_up", [False, True])
async def test_news_that_do_not_come_are_not_waited_for_after_close(redis_cluster, given_up):
    store = open_backend(redis_cluster.url).inner
    await store.open([])
    router, asked = store._parts.router, []

    async def no_answer():
        asked.append(asyncio.current_task())
        await asyncio.sleep(3600)

    router.topology.discover = no_answer
    router.topology.suspect()
    async with asyncio.timeout(60):
        await router.refresh()
        closing = asyncio.ensure_future(store.close())
        if given_up:
            await asyncio.sleep(0)
            closing.cancel()
        await asyncio.wait({closing})
        await asyncio.wait(asked)
    # A call that was between two questions goes on after the close.
    router.topology._due_at = 0
    with pytest.raises(BackendUnavailable, match="is closed"):
        await router.refresh()
    assert len(asked) == 1


async def test_node_that_is_gone_is_an_error_for_its_keys(redis_cluster, kit, prefix):
    store = open_backend(f"{redis_cluster.url}?prefix={prefix}&timeout=300ms").inner
    await answered(lambda: store.open([]))
    keys = kit.keys("gone", count=9)
    blocks = [kit.block(key, nbytes=1000) for key in keys]
    assert await answered(lambda: store.save(blocks)) == 9
    gone = redis_cluster.node_of(f"{prefix}b:{keys[0].hex()}")
    gone.freeze()
    try:
        with pytest.raises(BackendUnavailable, match=str(gone.port)):
            await store.lookup(keys)
        with pytest.raises(BackendUnavailable, match=str(gone.port)):
            await store.load(keys, [kit.buffer(1000) for _ in keys])
    finally:
        gone.thaw()
    assert await answered(lambda: load(store, kit, keys, 1000)) == 9
    await store.close()


@pytest.fixture
def group(tmp_path):
    made = RedisGroup(tmp_path / "group")
    try:
        yield made.start()
    finally:
        made.stop()


async def test_sentinels_lead_to_the_master_and_to_the_next_one_and_are_not_missed_later(
    group, kit
):
    with pytest.raises(ConfigurationError, match="service 'kw' is unknown there; they know kv"):
        await open_backend(group.url.replace("/kv", "/kw")).inner.open([])
    store = open_backend(f"{group.url}?timeout=60s").inner
    await store.open([])
    keys = kit.keys("sentinel", count=3)
    blocks = [kit.block(key, nbytes=MIB) for key in keys]
    assert await store.save(blocks) == 3
    assert len(group.master.names("kvconnect:")) == 3
    assert group.master.admin.wait(1, 5000) == 1
    group.master.stop()
    lost = 0
    async with asyncio.timeout(60):
        while True:
            try:
                if await store.save([kit.block(kit.key("after", lost), nbytes=MIB)]):
                    break
            except BackendUnavailable:
                lost += 1
            await asyncio.sleep(0.05)
    assert await load(store, kit, keys, MIB) == 3
    assert f"kvconnect:b:{kit.key('after', lost).hex()}" in group.replica.names("kvconnect:")
    group.sentinel.stop()
    store._parts.router.topology.suspect()
    assert await store.lookup(keys) == 3
    await store.close()


async def test_master_that_became_a_replica_is_not_asked_for_ever(group, kit):
    store = open_backend(f"{group.url}?timeout=60s").inner
    await store.open([])
    assert await store.save([kit.block(kit.key("before"), nbytes=1000)]) == 1
    ask = group.sentinel.admin.execute_command
    ask("SENTINEL", "REMOVE", group.service)  # a sentinel that has not noticed
    group.master.admin.replicaof("127.0.0.1", group.replica.port)
    group.replica.admin.replicaof("NO", "ONE")
    for number in range(3):
        assert await store.save([kit.block(kit.key("lost", number), nbytes=1000)]) == 0
    ask("SENTINEL", "MONITOR", group.service, "127.0.0.1", group.replica.port, 1)
    async with asyncio.timeout(60):
        while True:
            if await store.save([kit.block(kit.key("after"), nbytes=1000)]):
                break
            await asyncio.sleep(0.05)
    group.master.stop()
    assert await store.save([kit.block(kit.key("later"), nbytes=1000)]) == 1
    await store.close()
