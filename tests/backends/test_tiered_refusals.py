"""Several stores as one, when tiers refuse, and when blocks are deleted while they are loaded."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest
from tier_store import DictTier, tiered, until

from kvconnect.backends.daemon_threads import DaemonThreads
from kvconnect.backends.tiered import tier as tiered_tier
from kvconnect.errors import ConfigurationError
from kvconnect.trace import metrics


@pytest.fixture(autouse=True)
def _quick_probes(monkeypatch):
    monkeypatch.setattr(tiered_tier, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(tiered_tier, "_LONGEST_PAUSE_S", 0.01)
    metrics._warned.clear()


class Refusing(DictTier):
    """While it `refuses`, every call but `open` and `close` is one of a wrong configuration."""

    refuses = True

    async def _begin(self, name):
        await super()._begin(name)
        if self.refuses and name not in {"open", "close"}:
            raise ConfigurationError("no such bucket")


async def test_a_tier_that_refuses_hurts_no_other(kit):
    one, two = DictTier(), Refusing()
    keys = kit.keys("refused", count=3)
    async with tiered(two, one) as store:
        assert await store.save(kit.chain(keys)) == 3
        assert await store.lookup(keys) == 3
        assert await store.load(keys, kit.buffers(3)) == 3
        assert len(await store.children(None)) == 0
        assert [entry.key for entry in await store.describe(keys)] == keys
        assert (await store.stats())["blocks"] == 3
        await store.delete(keys[:1])
        assert one.keys() == set(keys[1:])
        two.refuses = False
        assert await store.save(kit.chain(keys)) == 3
        assert two.keys() == set(keys)


async def test_a_tier_that_refuses_a_probe_is_probed_again(kit):
    one, two = DictTier(), Refusing()
    async with tiered(one, two) as store:
        store.tiers[1].skip("it was late")
        await until(lambda: two.calls["lookup"] > 2)
        assert not store.tiers[1].alive
        two.refuses = False
        await until(lambda: store.tiers[1].alive)


@pytest.mark.parametrize("when", ["load", "describe"])
async def test_a_block_deleted_while_it_is_loaded_is_not_copied_to_a_faster_tier(kit, when):
    reached, go = asyncio.Event(), asyncio.Event()

    async def stop(name):
        if name == when:
            reached.set()
            await go.wait()

    one, two = DictTier(), DictTier()
    keys = kit.keys("dropped", count=3)
    two.put(*kit.chain(keys))
    values = {key: two.value(key) for key in keys}
    async with tiered(one, two) as store:
        load = asyncio.create_task(store.load(keys, kit.buffers(3)))
        two.before = stop
        await reached.wait()
        await store.delete(keys[1:])
        for key in keys[1:]:
            two.hold(key, values[key])  # as if it were read already
        go.set()
        assert await load == 3
        await until(lambda: not len(store.tiers[0].backlog))
        assert one.keys() == {keys[0]}
        assert not store._dropped


async def test_deletes_that_are_not_remembered_are_told_of(kit, monkeypatch, caplog):
    monkeypatch.setattr(tiered_tier, "_MAX_OWED", 3)
    one, two = DictTier(), DictTier()
    keys = kit.keys("owed", count=5)
    async with tiered(one, two) as store:
        await store.save(kit.chain(keys))
        two.down = True
        with caplog.at_level(logging.WARNING, "kvconnect"):
            await store.delete(keys[:2])
            assert "drop them again" not in caplog.text
            await store.delete(keys[2:])
        assert "3 blocks" in caplog.text
        assert "drop them again" in caplog.text


async def test_a_load_is_copied_though_a_tier_holds_all_threads_of_the_loop(kit):
    """As one does that calls `asyncio.to_thread`, and hangs."""
    stuck = threading.Event()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(DaemonThreads(2, "stuck"))
    held = [loop.run_in_executor(None, stuck.wait) for _ in range(2)]
    try:
        one, two = DictTier(), DictTier()
        key = kit.key("large")
        two.put(kit.block(key, nbytes=4 << 20))
        async with tiered(one, two) as store, asyncio.timeout(60):
            into = kit.buffer(4 << 20)
            assert await store.load([key], [into]) == 1
            into.zero_()
            await until(lambda: one.blocks)
            assert one.value(key).equal(two.value(key))
    finally:
        stuck.set()
        await asyncio.gather(*held)
    assert not [one for one in threading.enumerate() if one.name.startswith("kvconnect-backlog")]


async def test_copies_that_no_thread_makes_are_dropped(kit, only_threads):
    one, two = DictTier(), DictTier()
    key = kit.key("large")
    two.put(kit.block(key, nbytes=4 << 20))
    async with tiered(one, two) as store:
        with only_threads(0):
            assert await store.load([key], [kit.buffer(4 << 20)]) == 1
        assert not len(store.tiers[0].backlog)
        assert await store.load([key], [kit.buffer(4 << 20)]) == 1
        await until(lambda: one.blocks)
