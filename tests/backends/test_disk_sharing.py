"""One directory, several processes, models, openings, and times."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
import zlib
from contextlib import closing

import pytest
import torch

from kvconnect.backends import open_backend
from kvconnect.backends.disk import format as disk_schema
from kvconnect.backends.disk.store import DiskBackend
from kvconnect.errors import BackendUnavailable, ConfigurationError
from kvconnect.layout import KvCacheLayout
from kvconnect.testing.faults.clock import ShiftedClock
from kvconnect.testing.processes import children
from kvconnect.testing.subjects import DiskSubject


def size_of(file):
    try:
        return file.stat().st_size
    except FileNotFoundError:  # an owner's file, of a process that has just closed
        return 0


def sizes_on_disk(path):
    """Bytes of the data files, and of everything, while nobody can change them."""
    index = path / "index.sqlite3"
    if not index.exists() or not index.stat().st_size:
        return 0, 0
    with closing(sqlite3.connect(index, timeout=120, isolation_level=None)) as db:
        db.execute("PRAGMA wal_autocheckpoint=0")
        db.execute("BEGIN IMMEDIATE")
        sizes = {file.name: size_of(file) for file in path.iterdir()}
        db.execute("ROLLBACK")
    files = sum(size for name, size in sizes.items() if name.startswith("segment-"))
    return files, sum(sizes.values())


def slots_left_to_nobody(path):
    """Slots of the data files that hold no block and cannot be taken either."""
    with closing(sqlite3.connect(path / "index.sqlite3")) as db:
        query = "SELECT coalesce(sum(fresh), 0) FROM segments"
        tables = ("blocks", "free", "reserved")
        (used,), *held = (
            db.execute(q).fetchone()
            for q in (query, *(f"SELECT count(*) FROM {table}" for table in tables))
        )
        assert held[-1] == (0,)
    return used - sum(count for (count,) in held)


class Crowd:
    """Processes that save a chain each to one directory at the same time: of these lengths."""

    def __init__(self, directory, capacity, sizes, *, batch, count):
        subject = DiskSubject(directory / "store")
        self.path = subject.make_small(capacity).path
        self.sizes = sizes
        work = {"batch": batch, "count": count, "capacity": capacity}
        self.children = [
            children.start(subject, "save", name=str(number), nbytes=nbytes, **work)
            for number, nbytes in enumerate(sizes)
        ]
        self.blocks = [subject.blocks(str(number)) for number in range(len(sizes))]

    async def stored(self, store, number, keys):
        """How many of the blocks `keys` of a process are there; none is wrong."""
        blocks, found = self.blocks[number], 0
        for key in keys:
            (into,) = blocks.buffers(1, self.sizes[number])
            loaded = await store.load([blocks.key(key)], [into])
            assert not loaded or blocks.holds(into, blocks.key(key), framed=False)
            found += loaded
        return found


@pytest.mark.parametrize("blocks_that_fit", [pytest.param(64, marks=pytest.mark.slow), 4096])
async def test_five_processes_killed_at_once_lose_nothing_they_told_of(tmp_path, blocks_that_fit):
    nbytes = 32 << 10
    capacity = blocks_that_fit * nbytes
    crowd = Crowd(tmp_path, capacity, [nbytes] * 5, batch=8, count=4000)
    for _ in zip(range(7), crowd.children[0].listen(), strict=False):
        pass  # it is open, and has saved six times
    for child in crowd.children:
        child.kill()
    store = DiskBackend(crowd.path, capacity=capacity)
    acked = []
    for child in crowd.children:
        acked.append([one for one in child.wait() if "stored" in one])
        assert child.status == signal.SIGKILL
    await store.open([])
    told = kept = 0
    for number, saves in enumerate(acked):
        keys = [one["start"] + at for one in saves for at in range(one["stored"])]
        told += len(keys)
        kept += await crowd.stored(store, number, keys)
    files = (await store.stats())["file_bytes"]
    assert files == sizes_on_disk(crowd.path)[0] <= capacity
    assert told >= 6 * 8
    assert kept == told or blocks_that_fit == 64
    assert slots_left_to_nobody(crowd.path) == 0
    await store.close()


async def test_processes_of_different_models_share_the_capacity(tmp_path):
    capacity = 4 << 20
    crowd = Crowd(tmp_path, capacity, [32 << 10, 80 << 10, 100_000], batch=4, count=48)
    found = [sizes_on_disk(crowd.path) for child in crowd.children for _ in child.listen()]
    files, total = map(max, zip(*found, strict=True))
    assert files <= capacity
    # While a process is stopped in the middle of a transaction, the index's log grows to an eighth
    # of the capacity, and no further: saves are refused then.
    assert total <= capacity * 9 // 8
    assert sizes_on_disk(crowd.path)[1] <= capacity
    store = DiskBackend(crowd.path, capacity=1 << 30)
    await store.open([])
    assert sum([await crowd.stored(store, number, range(48)) for number in range(3)]) > 5
    await store.close()


def test_two_that_make_the_same_index_wait_for_each_other(tmp_path, monkeypatch):
    (tmp_path / disk_schema.INDEX_NAME).touch()
    with closing(sqlite3.connect(tmp_path / disk_schema.INDEX_NAME, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # as one has it that is just about to start the log
        monkeypatch.setattr(disk_schema.time, "sleep", lambda _: other.execute("COMMIT"))
        disk_schema.connect(tmp_path, "process", 1 << 16).close()
        assert not other.in_transaction


def test_an_index_that_somebody_keeps_making_is_given_up(tmp_path, monkeypatch):
    (tmp_path / disk_schema.INDEX_NAME).touch()
    monkeypatch.setattr(disk_schema, "_BUSY_S", 0.1)
    with closing(sqlite3.connect(tmp_path / disk_schema.INDEX_NAME, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(BackendUnavailable, match="another process holds the index's lock"):
            disk_schema.connect(tmp_path, "process", 1 << 16)


async def test_while_a_process_is_stopped_in_its_transaction(make_disk, kit, monkeypatch):
    monkeypatch.setattr(disk_schema, "_BUSY_S", 0.1)
    keys, fresh = kit.keys("stored", count=4), kit.keys("fresh", count=2)
    disk = make_disk()
    async with kit.opened(disk) as store:
        await store.save(kit.chain(keys))
        with closing(sqlite3.connect(disk.path / disk_schema.INDEX_NAME)) as other:
            other.execute("BEGIN IMMEDIATE")
            assert await kit.stored(store, keys) == [True] * 4  # readers need no lock
            with pytest.raises(BackendUnavailable, match="another process holds the index's lock"):
                await store.save(kit.chain(fresh))
            with pytest.raises(BackendUnavailable, match="another process holds the index's lock"):
                await make_disk().open([])
        await store.save(kit.chain(fresh))
        async with kit.opened(make_disk()) as late:
            assert await kit.stored(late, [*keys, *fresh]) == [True] * 6


async def test_power_durability_syncs_data_before_the_row(make_disk, kit, monkeypatch):
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(fd) or fsync(fd))
    keys = kit.keys("power", count=4)
    store = make_disk(durability="power")
    store.at = synced.append
    async with kit.opened(store):
        assert await store.save(kit.chain(keys)) == 4
        assert await kit.stored(store, keys) == [True] * 4
    assert [type(what) for what in synced] == [str, int, str, str]
    assert synced[2:] == ["written", "committing"]


async def test_smaller_capacity_at_reopening_drops_blocks(make_disk, kit, tmp_path):
    async with kit.opened(make_disk(capacity=8 << 20)) as store:
        for batch in range(40):
            await store.save(kit.chain(kit.keys(batch, count=16)))
    async with kit.opened(make_disk(capacity=1 << 20)) as store:
        assert sizes_on_disk(tmp_path / "store")[0] <= 1 << 20
        assert any(await kit.stored(store, kit.keys(39, count=16)))
        assert not any(await kit.stored(store, kit.keys(0, count=16)))


async def test_another_slot_size_gets_the_room_of_blocks_unused_for_longer(make_disk, kit):
    old, new = kit.keys("old", count=60), kit.keys("new", count=60)
    async with kit.opened(make_disk(capacity=2 << 20)) as store:
        for turn in range(4):
            await store.save(kit.chain(kit.keys("older", turn, count=60), nbytes=8192))
        await store.save(kit.chain(old, nbytes=8192))
        assert await store.save(kit.chain(new, nbytes=20480)) == 60
        assert await store.lookup(new) == 60
        assert (await store.stats())["file_bytes"] <= 2 << 20
        # And back again.
        back = kit.keys("back", count=200)
        assert await store.save(kit.chain(back, nbytes=8192)) == 200
        assert await store.lookup(back) == 200


# ---------------------------------------------------------------------------------------- time


class Clock:
    def __init__(self, monkeypatch):
        self.now = time.time_ns()
        monkeypatch.setattr(time, "time_ns", lambda: self.now)

    def forward(self, seconds):
        self.now += int(seconds * 1e9)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


async def test_slots_of_expired_blocks_are_used_again(make_disk, kit, clock):
    async with kit.opened(make_disk(ttl=60)) as store:
        for turn in range(10):
            await store.save(kit.chain(kit.keys("round", turn, count=100)))
            clock.forward(61)
        assert (await store.stats())["blocks"] <= 200
        assert (await store.stats())["file_bytes"] <= 16 << 20


# ---------------------------------------------------------------------------------------- format


async def test_directory_of_another_format_is_refused_untouched(make_disk, kit, tmp_path):
    path = tmp_path / "store"
    path.mkdir()
    text = b"kvconnect disk store, format 2"
    mark = text + b", check %08x\n" % zlib.crc32(text)
    (path / "FORMAT").write_bytes(mark)
    with pytest.raises(
        ConfigurationError, match=r"has format 2, this version reads format 1; give"
    ):
        await make_disk().open([kit.layout])
    assert [file.name for file in path.iterdir()] == ["FORMAT"]
    assert (path / "FORMAT").read_bytes() == mark


async def test_nobody_else_can_read_what_is_stored(make_disk, kit, tmp_path):
    async with kit.opened(make_disk()) as store:
        await store.save([kit.block(kit.key(1), tokens=[1, 2, 3])])
        assert (tmp_path / "store").stat().st_mode & 0o077 == 0
        readable = [f.name for f in (tmp_path / "store").iterdir() if f.stat().st_mode & 0o077]
        assert readable == []


async def test_default_capacity_is_bounded_by_the_space_there_is(kit, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 10 << 20})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    async with kit.opened(DiskBackend(tmp_path / "store")) as store:
        assert (await store.stats())["capacity"] == 5 << 20
        await store.save(kit.chain(kit.keys("some", count=50)))
    usage.free = 1 << 50
    async with kit.opened(DiskBackend(tmp_path / "store")) as store:
        assert (await store.stats())["capacity"] == 50 << 30


async def test_model_with_other_blocks_shares_the_directory(make_disk, kit):
    layout = KvCacheLayout(3, 2, 16, 16, 16, torch.float16)
    keys = kit.keys("model", count=4)
    async with kit.opened(open_backend(make_disk())) as store:
        await store.save(kit.chain(keys))
    other = open_backend(make_disk())
    await other.open([layout])
    assert await other.lookup(kit.keys("other model", count=4)) == 0
    await other.close()
    async with kit.opened(open_backend(make_disk())) as store:
        assert await kit.stored(store, keys) == [True] * 4


async def test_what_is_stored_now_is_kept_though_the_clock_of_another_was_ahead(make_disk, kit):
    """The clock was a day ahead while only the other process used the store."""
    options = {"capacity": 32 * kit.frame_nbytes}
    async with kit.opened(make_disk(**options)) as ahead, kit.opened(make_disk(**options)) as store:
        with ShiftedClock() as clock:
            clock.forward(86400)
            for turn in range(20):
                await ahead.save(kit.chain(kit.keys("ahead", turn, count=4)))
        mine = [kit.keys("mine", turn, count=4) for turn in range(4)]
        for keys in mine:
            assert await store.save(kit.chain(keys)) == 4
        assert [await store.lookup(keys) for keys in mine] == [4] * 4
