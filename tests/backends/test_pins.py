"""Pins of disk, memory and tiered stores, beyond what the kit checks of each."""

from __future__ import annotations

from contextlib import asynccontextmanager
from math import inf

import numpy as np
import pytest
import torch
from disk_index import by_hand
from tier_store import DictTier

from kvconnect.backend import StoredBlock
from kvconnect.backends import open_backend
from kvconnect.backends.disk.store import DiskBackend
from kvconnect.backends.guard.store import GuardedBackend
from kvconnect.backends.memory.store import MemoryBackend
from kvconnect.backends.tiered.store import TieredBackend
from kvconnect.backends.url import StoreUrl
from kvconnect.errors import BackendUnavailable, ConfigurationError
from kvconnect.keys import BlockKey

SIZE = 8192


def key(name) -> BlockKey:
    return BlockKey(repr(name).encode().ljust(32, b"."))


def chain(name, count, size=SIZE):
    data = torch.arange(size, dtype=torch.int64).to(torch.uint8)
    tokens = np.arange(4, dtype=np.int32)
    keys = [key((name, number)) for number in range(count)]
    return [
        StoredBlock(one, data, before, tokens)
        for one, before in zip(keys, [None, *keys], strict=False)
    ]


def keys_of(blocks):
    return [one.key for one in blocks]


@asynccontextmanager
async def opened(store, access="store"):
    await store.open([], access)
    try:
        yield store
    finally:
        await store.close()


async def press(store, count, size=SIZE, name="press"):
    for number in range(count):
        assert await store.save(chain((name, number), 1, size)) == 1


async def there(store, blocks):
    return [await store.lookup([one.key]) == 1 for one in blocks]


def before_pins(directory) -> None:
    """Makes the index one of a version that knew no pins."""
    with by_hand(directory) as db:
        for statement in (
            "DROP INDEX blocks_pinned",
            "DROP INDEX blocks_by_use",
            "ALTER TABLE blocks DROP COLUMN pinned",
            "CREATE INDEX blocks_by_use ON blocks(size, priority, used)",
        ):
            db.execute(statement)


async def test_a_disk_store_of_before_is_read_and_its_blocks_can_be_pinned(tmp_path):
    blocks = chain("a", 6)
    async with opened(DiskBackend(tmp_path, capacity=1 << 20)) as store:
        assert await store.save(blocks) == 6
    before_pins(tmp_path)
    async with opened(DiskBackend(tmp_path, ttl=60), "read") as store:
        assert await store.lookup(keys_of(blocks)) == 6
        assert [entry.pinned_until async for entry in store.scan()] == [0.0] * 6
        assert len(await store.children(blocks[0].key)) == 1
        assert (await store.stats())["pinned_blocks"] == 0
        assert None not in await store.describe(keys_of(blocks))
    async with opened(DiskBackend(tmp_path, capacity=1 << 20), "maintain") as store:
        assert await store.pin(keys_of(blocks), inf) == [True] * 6
    async with opened(DiskBackend(tmp_path, capacity=1 << 20)) as store:
        await press(store, 200)
        assert all(await there(store, blocks))


async def test_a_pin_by_another_process_holds_in_an_engine_that_runs(tmp_path):
    """A command pins in the directory that an engine has open, and fills."""
    mine = chain("mine", 8)
    async with opened(DiskBackend(tmp_path, capacity=1 << 18)) as engine:
        await engine.save(mine)
        command = DiskBackend(tmp_path, capacity=1 << 18)
        async with opened(command, "maintain"):
            assert await command.pin(keys_of(mine), inf) == [True] * 8
        await press(engine, 10 * (1 << 18) // SIZE)
        assert all(await there(engine, mine))
        async with opened(command, "maintain"):
            assert await command.pin(keys_of(mine), None) == [True] * 8
        await press(engine, 3 * (1 << 18) // SIZE, name="more")
        assert not any(await there(engine, mine))


async def test_blocks_of_another_size_do_not_take_the_file_of_pinned_ones(tmp_path):
    mine, other = chain("mine", 8), chain("other", 40)
    async with opened(DiskBackend(tmp_path, capacity=1 << 20)) as store:
        await store.save(mine)
        await store.pin(keys_of(mine), inf)
        await store.save(other)
        await press(store, 60, 4 * SIZE)
        assert all(await there(store, mine))
        assert not all(await there(store, other))


async def test_a_capacity_that_is_made_smaller_counts_more_than_pins(tmp_path):
    mine = chain("mine", 60)
    async with opened(DiskBackend(tmp_path, capacity=1 << 20, pin_fraction=1.0)) as store:
        await store.save(mine)
        assert sum(await store.pin(keys_of(mine), inf)) > 40
        await press(store, 30)
    async with opened(DiskBackend(tmp_path, capacity=1 << 18)) as store:
        assert (await store.stats())["file_bytes"] <= 1 << 18


async def test_the_share_of_pins_is_a_parameter_of_the_url(tmp_path):
    for fraction, most in ((0, 0), (0.25, 32), (1, 128)):
        url = f"disk:{tmp_path}/{fraction}?capacity=1MiB&pin_fraction={fraction}"
        async with opened(open_backend(url, raw=True)) as store:
            blocks = chain("a", 100)
            saved = await store.save(blocks)
            found = await store.pin(keys_of(blocks[:saved]), inf)
            assert sum(found) == min(most, saved)
            assert (await store.stats())["pinned_bytes"] == sum(found) * SIZE
    for wrong in ("2", "-1", "half", "1.5", "nan", "1e-1"):
        with pytest.raises(ConfigurationError, match=f"pin_fraction={wrong}: a number from 0 to 1"):
            open_backend(f"memory:?pin_fraction={wrong}")


async def test_a_full_memory_store_of_pinned_leaves_still_drops_others():
    store = MemoryBackend(64 << 16)  # units of 64 KiB, where no layout is known
    async with opened(store):
        pinned = [chain(("mine", n), 1)[0] for n in range(30)]
        assert await store.save(pinned) == 30
        assert await store.pin(keys_of(pinned), inf) == [True] * 30
        await press(store, 640)
        assert all(await there(store, pinned))
        await store.delete(keys_of(pinned))
        assert (await store.stats())["pinned_blocks"] == 0
        assert await store.save(chain("all", 60)) == 60


async def test_every_tier_with_pins_pins_what_it_has(tmp_path):
    tiers = [MemoryBackend(64 * SIZE), DiskBackend(tmp_path, capacity=1 << 20)]
    blocks = chain("a", 4)
    tiered = TieredBackend([*tiers, DictTier(durable=True)])
    assert tiered.capabilities.pins
    async with opened(tiered):
        await tiered.save(blocks)
        await tiers[0].delete([blocks[3].key])
        assert await tiered.pin([*keys_of(blocks), key("absent")], inf) == [True] * 4 + [False]
        numbers = await tiered.stats()
        assert (numbers["pinned_blocks"], numbers["memory.pinned_blocks"]) == (4, 3)
        assert await tiered.pin(keys_of(blocks), None) == [True] * 4
        assert (await tiered.stats())["pinned_blocks"] == 0


async def test_a_store_without_pins_refuses_by_name():
    tiered = TieredBackend([DictTier(), DictTier()])
    assert not tiered.capabilities.pins
    for store, name in ((DictTier(), "DictTier"), (tiered, "TieredBackend")):
        async with opened(GuardedBackend(store, raw=True)) as guard:
            with pytest.raises(ConfigurationError, match=f"{name}: this store cannot pin"):
                await guard.pin([key("a")], inf)


@pytest.mark.parametrize("answer", [None, [], [1], [True, True], "yes"])
async def test_a_malformed_answer_is_that_of_a_store_that_fails(answer):
    class Odd(DictTier):
        async def pin(self, keys, until):
            return answer

    async with opened(GuardedBackend(Odd(), raw=True)) as guard:
        with pytest.raises(BackendUnavailable, match="pin answered"):
            await guard.pin([key("a")], inf)


def test_s3_says_that_it_has_no_pins():
    assert not open_backend(str(StoreUrl.parse("s3://bucket/prefix"))).capabilities.pins
