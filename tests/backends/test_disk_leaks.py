"""Calls of a disk store that fail leave nothing behind: no slot, descriptor, file or memory."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import sqlite3
import threading
from contextlib import closing, contextmanager

import pytest

from kvconnect.backends import open_backend
from kvconnect.backends.disk import format as disk_format
from kvconnect.backends.disk.directory import DiskDirectory
from kvconnect.backends.disk.eviction import Eviction
from kvconnect.backends.disk.settings import DiskSettings
from kvconnect.errors import BackendUnavailable
from kvconnect.testing.processes.usage import open_files


@contextmanager
def index_of(path):
    """A connection of another process, so to speak, to the index in `path`; on any thread."""
    index = path / disk_format.INDEX_NAME
    with closing(sqlite3.connect(index, isolation_level=None, check_same_thread=False)) as other:
        yield other


@pytest.mark.parametrize("maintains", [False, True], ids=["save", "erase"])
async def test_slots_that_a_stopped_process_kept_from_being_freed_are_free_later(
    make_disk, kit, path, monkeypatch, maintains
):
    """Another process is stopped in its transaction while blocks are written, or overwritten."""
    monkeypatch.setattr(disk_format, "_BUSY_S", 0.02)
    stops = threading.Event()
    disk = make_disk()
    keys = kit.keys("kept", count=4)

    def at(point):
        if point == ("erasing" if maintains else "written") and stops.is_set():
            other.execute("BEGIN IMMEDIATE")

    disk.at = at
    async with kit.opened(disk):
        await disk.save(kit.chain(keys))
    async with kit.opened(disk, "maintain" if maintains else "store"):
        with index_of(path) as other:
            for turn in range(6):
                stops.set()
                with pytest.raises(BackendUnavailable, match="holds the index's lock"):
                    await (
                        disk.delete(keys[2:])
                        if maintains
                        else disk.save(kit.chain(kit.keys("lost", turn, count=4)))
                    )
                stops.clear()
                other.execute("ROLLBACK")
                assert await disk.save(kit.chain(keys)) == 4
            assert other.execute("SELECT count(*) FROM reserved").fetchone() == (0,)
    assert lost_slots(path) == 0


def lost_slots(path):
    """Slots that were used, and are neither a block's nor free."""
    with index_of(path) as other:
        (used,) = other.execute("SELECT coalesce(sum(fresh), 0) FROM segments").fetchone()
        (blocks,) = other.execute("SELECT count(*) FROM blocks").fetchone()
        (free,) = other.execute("SELECT count(*) FROM free").fetchone()
    return used - blocks - free


def test_an_index_that_is_full_as_it_is_opened_keeps_no_owner(tmp_path, monkeypatch, lanes):
    """Every five seconds it is tried again."""
    settings = DiskSettings(tmp_path / "store", 64 << 20)
    DiskDirectory(settings, lanes).close()

    def full(eviction):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Eviction, "prepare", full)
        directory = DiskDirectory(settings, lanes)
        assert directory.read_only
        assert [name for name in open_files(settings.path) if "owner" in str(name)] == []
        assert list(settings.path.glob("owner-*")) == []
        directory.close()
    assert open_files(settings.path) == []


async def test_a_disk_that_hangs_collects_no_flushes(make_disk, kit, monkeypatch):
    """Lookups continue, and every five seconds the times of use are to be written."""
    goes_on, begun = threading.Event(), threading.Semaphore(0)

    def hangs(directory):
        begun.release()
        assert goes_on.wait(60)

    async with kit.opened(make_disk()) as store:
        client = store._client
        with monkeypatch.context() as patch:
            patch.setattr(DiskDirectory, "flush", hangs)
            client._start_flush()
            assert await asyncio.to_thread(begun.acquire, timeout=60)
            for _ in range(20):
                client._start_flush()
            waiting = client.lanes["saves"]._queue.qsize()
            goes_on.set()
            await asyncio.wrap_future(client._flushing)
        assert not waiting
        assert not begun.acquire(blocking=False)
        client._start_flush()
        await asyncio.wrap_future(client._flushing)


async def test_what_stands_in_place_of_the_directory_hurts_no_other_tier(kit, tmp_path):
    place, aside = tmp_path / "store", tmp_path / "aside"
    url = f"tiered:?tiers=memory:?capacity=8MiB,disk:{place}?capacity=8MiB&patience=60s"
    keys, more = kit.keys("there", count=4), kit.keys("more", count=2)
    async with kit.opened(open_backend(url)) as store:
        assert await store.save(kit.chain(keys)) == 4
        place.rename(aside)
        place.write_text("a file")
        assert await store.lookup(keys) == 4
        into = kit.buffers(4)
        assert await store.load(keys, into) == 4
        assert all(kit.holds(b, key) for b, key in zip(into, keys, strict=True))
        assert await store.save(kit.chain(more)) == 0  # the durable tier decides
        assert await store.lookup(more) == 2
        place.unlink()
        shutil.move(aside, place)
        assert await store.inner.tiers[1].lookup(keys) == 4


async def test_a_directory_that_is_a_file_for_a_while_is_unavailable_for_that_time(
    make_disk, kit, path
):
    keys = kit.keys("for a while", count=2)
    async with kit.opened(make_disk()) as store:
        await store.save(kit.chain(keys))
        path.rename(path.with_name("aside"))
        path.write_text("a file")
        for call in (store.lookup(keys), store.load(keys, kit.buffers(2)), store.stats()):
            with pytest.raises(BackendUnavailable, match="is not a directory"):
                await call
        path.unlink()
        path.with_name("aside").rename(path)
        assert await kit.stored(store, keys) == [True, True]
