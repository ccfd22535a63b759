"""What the disk and the memory store keep with a block, and who may look at it."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from disk_index import by_hand, loosen

from kvconnect.backends import open_backend
from kvconnect.errors import ConfigurationError
from kvconnect.keys import Namespace

NAMESPACE = Namespace("salt", "adapter").tag()


def full(block, **changes):
    known = {
        "tokens": np.arange(5, dtype=np.int32),
        "priority": 71,
        "namespace": NAMESPACE,
        "model": b"m" * 32,
        "group": 3,
    }
    return replace(block, **{**known, **changes})


def files(path):
    return {file.name: file.stat().st_size for file in path.iterdir()}


async def test_scan_tells_all_that_was_saved(make_bare, kit):
    parent, key = kit.keys("entry", count=2)
    async with kit.opened(make_bare()) as store:
        await store.save([full(kit.block(key, parent, nbytes=5000)), kit.block(parent)])
        await check_entries(store, kit, parent, key)
    if store.capabilities.durable:
        async with kit.opened(make_bare()) as store:
            await check_entries(store, kit, parent, key)


async def check_entries(store, kit, parent, key):
    scanned = {entry.key: entry async for entry in store.scan()}
    described = await store.describe([key, kit.key("absent"), parent])
    assert described[1] is None
    if described[0] is None:  # a store need not know without listing
        described = [scanned[key], None, scanned[parent]]
    for entry in (scanned[key], described[0]):
        assert (entry.nbytes, entry.priority, entry.parent) == (5000, 71, parent)
        assert (entry.namespace, entry.model, entry.group) == (NAMESPACE, b"m" * 32, 3)
        assert entry.tokens.tolist() == [0, 1, 2, 3, 4]
        assert entry.tokens.dtype == np.int32
        assert 0 < entry.created_at <= entry.used_at
    for entry in (scanned[parent], described[2]):
        assert (entry.parent, entry.tokens, entry.model, entry.group) == (None, None, b"", 0)


async def test_describing_is_no_use(kit, make_disk, tmp_path):
    store = open_backend(f"memory:?capacity={2 * kit.frame_nbytes}")
    old, new, third = kit.keys("use", count=3)
    async with kit.opened(store):
        await store.save([kit.block(old)])
        await store.save([kit.block(new)])
        await store.describe([old])
        await store.save([kit.block(third)])
        assert await kit.stored(store, [old, new, third]) == [False, True, True]


@pytest.mark.parametrize("make_bare", ["memory", "disk"], indirect=True)
async def test_loads_are_counted_lookups_are_not(make_bare, kit):
    keys = kit.keys("a", count=3)
    async with kit.opened(make_bare()) as store:
        await store.save(kit.chain(keys))
        assert await store.lookup(keys) == 3
        assert await store.load(keys, kit.buffers(3)) == 3
        assert await store.load(keys[:2], kit.buffers(2)) == 2
        await store.save(kit.chain(kit.keys("b", count=1)))  # a disk store writes them down
        entries = {entry.key: entry async for entry in store.scan()}
    assert [entries[key].hits for key in keys] == [2, 2, 1]


# ---------------------------------------------------------------------------------------- format


@pytest.fixture
async def old_store(make_disk, kit):
    """A store whose index an older version has made, without ``model`` and ``expires``."""
    store = make_disk()
    keys = kit.keys("old", count=4)
    async with kit.opened(store):
        await store.save(kit.chain(keys))
    path = store._settings.path
    with by_hand(path) as db:
        db.execute("DROP INDEX blocks_ending")
        for column in ("model", "expires"):
            db.execute(f"ALTER TABLE blocks DROP COLUMN {column}")
    return path, keys


async def test_store_of_an_older_version_goes_on(make_disk, kit, old_store):
    _, keys = old_store
    new = kit.key("new")
    async with kit.opened(make_disk()) as store:
        assert await kit.stored(store, keys) == [True] * 4
        await store.save([replace(full(kit.block(new)), expires_at=4e9)])
        ends = [one.expires_at for one in await store.describe([keys[0], new])]
        models = {entry.key: entry.model async for entry in store.scan()}
    assert models == {**dict.fromkeys(keys, b""), new: b"m" * 32}
    assert ends == [None, 4e9]


async def test_store_of_an_older_version_can_be_looked_at(make_disk, old_store):
    path, keys = old_store
    store = make_disk()
    await store.open([], "read")
    assert {entry.key: entry.model async for entry in store.scan()} == dict.fromkeys(keys, b"")
    await store.close()
    with by_hand(path) as db:
        columns = {name for _, name, *_ in db.execute("PRAGMA table_info(blocks)")}
    assert not columns & {"model", "expires"}


async def test_a_reader_of_an_older_index_obeys_ends_that_a_newer_version_adds(
    make_disk, kit, old_store
):
    """It was opened before the index had the columns, while the older version had it open."""
    path, keys = old_store
    over, mine = kit.keys("own", count=2)
    with by_hand(path) as older:
        older.execute("SELECT count(*) FROM blocks").fetchall()
        async with kit.opened(make_disk(), "read") as reader:
            assert await reader.lookup(keys) == 4
            async with kit.opened(make_disk()) as store:
                await store.save([replace(kit.block(mine), expires_at=4e9)])
                await store.save([replace(kit.block(over), expires_at=time.time() - 1)])
            assert await kit.stored(reader, [over, mine]) == [False, True]
            assert await reader.describe([over]) == [None]
            assert over not in {entry.key async for entry in reader.scan()}


async def test_loads_of_a_store_of_an_older_version_are_counted_from_then_on(make_disk, path, kit):
    keys = kit.keys("a", count=2)
    async with kit.opened(make_disk()) as store:
        await store.save(kit.chain(keys))
    with by_hand(path) as db:
        db.execute("ALTER TABLE blocks DROP COLUMN hits")
    async with kit.opened(make_disk(), "read") as store:
        assert [one.hits async for one in store.scan()] == [None, None]
        assert await store.load(keys, kit.buffers(2)) == 2
    async with kit.opened(make_disk()) as store:
        assert await store.load(keys, kit.buffers(2)) == 2
    async with kit.opened(make_disk(), "read") as store:
        assert [one.hits async for one in store.scan()] == [1, 1]


async def test_blocks_whose_own_time_is_over_leave_their_slots_at_the_next_save(make_disk, kit):
    mine, kept, new = kit.keys("own", count=3)
    async with kit.opened(make_disk()) as store:
        await store.save([replace(kit.block(mine), expires_at=time.time() - 1), kit.block(kept)])
        assert [entry.key async for entry in store.scan()] == [kept]
        assert (await store.stats())["blocks"] == 2
        await store.save([kit.block(new)])
        assert (await store.stats())["blocks"] == 2


async def test_damaged_rows_do_not_end_a_listing(make_disk, kit):
    store = make_disk()
    keys = kit.keys("damaged", count=4)
    async with kit.opened(store):
        await store.save([full(kit.block(key)) for key in keys])
    loosen(store._settings.path)
    async with kit.opened(store):
        with by_hand(store._settings.path) as db:
            db.execute("UPDATE blocks SET created='yesterday' WHERE key=?", (keys[0],))
            db.execute("UPDATE blocks SET tokens=x'010203', parent='p' WHERE key=?", (keys[1],))
            db.execute("UPDATE blocks SET key='text' WHERE key=?", (keys[2],))
        listed = {entry.key: entry async for entry in store.scan()}
        assert listed.keys() == {keys[1], keys[3]}
        assert listed[keys[1]].tokens is None
        assert listed[keys[1]].parent is None


# ---------------------------------------------------------------------------------------- access


async def test_reading_leaves_no_trace(make_disk, kit):
    keys = kit.keys("trace", count=4)
    store = make_disk()
    async with kit.opened(store):
        await store.save(kit.chain(keys))
    path = store._settings.path
    before = files(path)
    with by_hand(path) as db:
        used = db.execute("SELECT used FROM blocks ORDER BY id").fetchall()
    # Not even a capacity that has room for nothing makes it drop something.
    reader = make_disk(capacity=kit.frame_nbytes, ttl=1e-6)
    async with kit.opened(reader, "read"):
        pass
    reader = make_disk(capacity=kit.frame_nbytes)
    async with kit.opened(reader, "read"):
        assert await kit.stored(reader, keys) == [True] * 4
        assert await reader.save([kit.block(kit.key("new"))]) == 0
    with by_hand(path) as db:
        assert db.execute("SELECT used FROM blocks ORDER BY id").fetchall() == used
    kept = {name: size for name, size in files(path).items() if not name.endswith(("-shm", "-wal"))}
    assert kept == before


async def test_maintenance_deletes_what_it_is_told_to_and_no_more(make_disk, kit):
    keys = kit.keys("maintain", count=40)
    async with kit.opened(make_disk()) as engine:
        await engine.save(kit.chain(keys))
        tool = make_disk(capacity=kit.frame_nbytes)
        async with kit.opened(tool, "maintain"):
            await tool.delete(keys[30:])
        assert await kit.stored(engine, keys) == [True] * 30 + [False] * 10
        assert await engine.save(kit.chain(keys)) == 40
        assert await kit.stored(engine, keys) == [True] * 40


async def test_what_maintenance_reads_is_not_used_by_that(make_disk, kit):
    keys = kit.keys("looked at", count=4)
    async with kit.opened(make_disk()) as store:
        await store.save(kit.chain(keys))
    tool = make_disk()
    async with kit.opened(tool, "maintain"):
        before = {entry.key: entry.used_at async for entry in tool.scan()}
        assert await kit.stored(tool, keys) == [True] * 4
    async with kit.opened(make_disk()) as store:
        assert {entry.key: entry.used_at async for entry in store.scan()} == before


async def test_maintenance_gives_back_data_files_without_blocks(make_disk, kit):
    keys = kit.keys("files", count=8)
    async with kit.opened(make_disk()) as engine:
        await engine.save(kit.chain(keys))
        path = engine._settings.path
        assert [name for name in files(path) if name.startswith("segment-")]
        tool = make_disk()
        async with kit.opened(tool, "maintain"):
            await tool.delete(keys)
        assert not [name for name in files(path) if name.startswith("segment-")]
        assert await kit.stored(engine, keys) == [False] * 8
        assert await engine.save(kit.chain(keys)) == 8
        assert await kit.stored(engine, keys) == [True] * 8


@pytest.mark.parametrize("access", ["read", "maintain"])
async def test_looking_at_a_store_does_not_make_one(make_disk, tmp_path, access):
    store = make_disk()
    with pytest.raises(ConfigurationError, match=r"there is none in .*; give another"):
        await store.open([], access)
    assert not (tmp_path / "store").exists()


async def test_without_a_capacity_a_store_keeps_what_there_is_and_does_not_grow(
    make_disk, kit, monkeypatch
):
    keys = kit.keys("default", count=400)
    async with kit.opened(make_disk(capacity=400 * kit.frame_nbytes)) as store:
        await store.save(kit.chain(keys))
        held = (await store.stats())["blocks"]
        stored = [entry.key async for entry in store.scan()]
        size = (await store.stats())["file_bytes"]
    monkeypatch.setattr("kvconnect.backends.disk.path._DEFAULT_CAPACITY", kit.frame_nbytes)
    for turn in range(3):
        async with kit.opened(make_disk(capacity=None)) as store:
            if turn == 0:
                assert await kit.stored(store, stored) == [True] * held
            assert await store.save([kit.block(key) for key in kit.keys(turn, count=50)]) == 50
            assert (await store.stats())["file_bytes"] == size
