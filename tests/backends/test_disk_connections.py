"""Connections to the disk store's index: one thread at a time uses each, and none stays open."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
import sys
import threading
import weakref
from functools import partial
from pathlib import Path

import pytest

from kvconnect.backends.disk import find as disk_index
from kvconnect.backends.disk import store as disk_store
from kvconnect.backends.disk.directory import DiskDirectory
from kvconnect.backends.disk.errors import IndexConnectionLost, index_errors
from kvconnect.backends.disk.files import owner as disk_owner
from kvconnect.backends.disk.save import save
from kvconnect.backends.disk.settings import DiskSettings
from kvconnect.errors import BackendUnavailable
from kvconnect.testing.processes.usage import open_files


class Watched(sqlite3.Connection):
    """Knows its cursors."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.cursors = weakref.WeakSet()

    def execute(self, statement, *values):
        assert statement.strip()
        return self.known(super().execute(statement, *values))

    def executemany(self, *arguments):
        return self.known(super().executemany(*arguments))

    def known(self, cursor):
        self.cursors.add(cursor)
        return cursor


class WatchedLock:
    """In place of the lock of `one`, a reader or a writer: counts who leaves it, and with what."""

    def __init__(self, one):
        self.connection = one._db
        self.lock = threading.Lock()
        self.left = 0
        self.cursors = 0
        one._lock = self

    def __enter__(self):
        self.lock.acquire()

    def __exit__(self, *error):
        self.left += 1
        self.cursors += len(self.connection.cursors)
        self.lock.release()


@pytest.fixture
def opened(make_disk, kit, monkeypatch):
    """Opens stores whose connections know their cursors."""
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Watched))
    return lambda **options: kit.opened(make_disk(**options))


@pytest.fixture
def settings(tmp_path):
    return DiskSettings(tmp_path / "store", 64 << 20)


def watched(store):
    return [
        WatchedLock(store._client.directory.reader),
        WatchedLock(store._client.directory.writer),
    ]


def names(path, pattern):
    return sorted(found.name for found in path.glob(pattern))


# --------------------------------------------------------------------------- one thread at a time


async def use(store, kit):
    """Each operation of a store, with blocks that are there, absent, in the way and dropped."""
    keys = kit.keys("used", count=6)
    assert await store.save(kit.chain(keys[:4])) == 4
    assert await store.save(kit.chain(keys)) == 6
    assert await store.lookup(keys) == 6
    assert await store.load(keys, kit.buffers(6)) == 6
    assert len([entry async for entry in store.scan()]) == 6
    await store.children(keys[0])
    await store.describe(keys)
    await store.stats()
    await save_many(store, kit)
    assert await store.lookup(keys) < 6
    await store.delete(keys)


async def save_many(store, kit):
    """Flushes what was used, makes data files, then drops older blocks."""
    for turn in range(60):
        await store.save(kit.chain(kit.keys(turn, count=4)))


async def test_no_cursor_outlives_the_lock_of_its_connection(opened, kit):
    async with opened(capacity=2 << 20, ttl=3600) as store:
        locks = watched(store)
        await use(store, kit)
        assert all(lock.left > 5 for lock in locks)
        assert [lock.cursors for lock in locks] == [0, 0]


@pytest.mark.parametrize("point", ["evicted", "committing"])
async def test_no_cursor_outlives_the_lock_of_a_transaction_that_fails(opened, kit, point):
    def fail(reached):
        if reached == point:
            raise OSError(errno.EIO, "fails here")

    async with opened(capacity=2 << 20) as store:
        locks = watched(store)
        store._client.directory.writer._at = store._client.directory.writer._slots._at = fail
        with pytest.raises(BackendUnavailable, match="fails here"):
            await save_many(store, kit)
        assert [lock.cursors for lock in locks] == [0, 0]


@pytest.mark.slow
def test_threads_that_save_at_once_lose_no_connection(kit, settings, lanes):
    directory = DiskDirectory(settings, lanes)
    failed = []

    def save_some(who):
        for turn in range(3000):
            keys = kit.keys(who, turn, count=2)
            try:
                assert save(directory, kit.chain(keys)) == 2
                directory.delete(keys)
            except IndexConnectionLost as error:
                failed.append(error)
            if failed:
                return

    threads = [threading.Thread(target=save_some, args=(who,)) for who in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        directory.close()
    assert failed == []


# ------------------------------------------------------------------------------------ none is left


class Hanging:
    """In place of what a call does in a directory: ends when it may, and then fails."""

    def __init__(self):
        self.calls = threading.Semaphore(0)
        self.goes_on = threading.Event()

    def __call__(self, *arguments, **named):
        self.calls.release()
        assert self.goes_on.wait(60)
        raise IndexConnectionLost("lost meanwhile")

    async def reached(self, calls=1):
        for _ in range(calls):
            assert await asyncio.to_thread(self.calls.acquire, timeout=60)


@pytest.fixture
def hanging(monkeypatch):
    hanging = Hanging()
    monkeypatch.setattr(disk_store, "load", hanging)
    monkeypatch.setattr(DiskDirectory, "lookup", hanging)
    yield hanging
    hanging.goes_on.set()


async def test_close_lets_every_call_end_that_came_before_it(make_disk, kit):
    store = make_disk()
    await store.open([kit.layout])
    keys = kit.keys("there", count=16)
    assert await store.save(kit.chain(keys)) == 16
    loading = [asyncio.create_task(store.load([key], kit.buffers(1))) for key in keys]
    await asyncio.sleep(0)
    await store.close()
    assert await asyncio.gather(*loading) == [1] * 16


async def test_loads_do_not_wait_for_saves(make_disk, kit, monkeypatch):
    saves = Hanging()
    async with kit.opened(make_disk()) as store:
        keys = kit.keys("there", count=1)
        assert await store.save(kit.chain(keys)) == 1
        monkeypatch.setattr(disk_store, "save", saves)
        chains = [kit.chain(kit.keys("saved", number, count=1)) for number in range(8)]
        saving = [asyncio.create_task(store.save(chain)) for chain in chains]
        await saves.reached(4)  # as many as there are threads
        assert await store.load(keys, kit.buffers(1)) == 1
        saves.goes_on.set()
        await asyncio.wait(saving)


@pytest.mark.parametrize("there_are", [0, 3])
async def test_store_that_gets_too_few_threads_keeps_none_and_opens_later(
    make_disk, kit, only_threads, there_are
):
    store, told = make_disk(), "can't start new thread"
    with only_threads(there_are), pytest.raises(BackendUnavailable, match=told):
        await store.open([kit.layout])
    async with kit.opened(store):
        pass


async def test_call_that_outlives_a_close_opens_nothing(make_disk, kit, hanging, monkeypatch):
    closed = DiskDirectory.close

    def close(directory):
        closed(directory)
        hanging.goes_on.set()

    monkeypatch.setattr(DiskDirectory, "close", close)
    store = make_disk()
    await store.open([kit.layout])
    client = store._client
    looking = asyncio.create_task(store.lookup(kit.keys("looked up", count=1)))
    await hanging.reached()
    closing = asyncio.create_task(store.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(BackendUnavailable, match="is not open"):
        await looking
    await asyncio.to_thread(client.lanes.join)
    assert client.directory is None
    assert names(store.path, "owner-*") == []


async def test_store_whose_close_was_given_up_can_be_opened_again(make_disk, kit, hanging):
    store = make_disk()
    await store.open([kit.layout])
    lanes = store._client.lanes
    keys = kit.keys("loaded", count=4)
    loading = [asyncio.create_task(store.load([key], kit.buffers(1))) for key in keys]
    await hanging.reached(4)
    closing = asyncio.create_task(store.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    await store.open([kit.layout])
    hanging.goes_on.set()
    await asyncio.wait(loading)
    await asyncio.to_thread(lanes.join)
    assert await store.save(kit.chain(keys)) == 4
    await store.close()
    assert names(store.path, "owner-*") == []


async def test_use_is_written_down_in_time_also_after_a_second_open(make_disk, kit):
    store = make_disk()
    for _ in range(2):
        async with kit.opened(store):
            await store.lookup(kit.keys("used", count=1))
            assert not store._client._flush_timer.cancelled()


def test_open_that_fails_closes_its_connections_at_once(settings, monkeypatch, lanes):
    def fails(db, column):
        raise sqlite3.OperationalError("disk I/O error")

    DiskDirectory(settings, lanes).close()
    monkeypatch.setattr(disk_index, "has_column", fails)
    with pytest.raises(Exception, match="I/O error") as raised:
        DiskDirectory(settings, lanes)
    assert open_files(settings.path) == []
    del raised


def test_index_that_is_given_up_is_closed(kit, settings, lanes):
    directory = DiskDirectory(settings, lanes)
    reader = directory.reader
    keys = kit.keys("given up", count=1)
    assert save(directory, kit.chain(keys)) == 1
    directory.give_up_index()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        reader._db.execute("SELECT 1")
    assert directory.lookup(keys) == 0
    directory.close()


# ------------------------------------------------------------------------------- files and errors


def test_index_is_opened_by_sqlite_alone(settings, monkeypatch, lanes):
    # Closing another descriptor of it drops the locks that this process has on it.
    paths = []
    opens = os.open

    def note(path, *arguments, **options):
        paths.append(os.fspath(path))
        return opens(path, *arguments, **options)

    monkeypatch.setattr(os, "open", note)
    DiskDirectory(settings, lanes).close()
    assert paths
    assert [path for path in paths if Path(path).name.startswith("index")] == []
    assert (settings.path / "index.sqlite3").stat().st_mode & 0o777 == 0o600


def test_owner_closes_its_descriptor_once(tmp_path, monkeypatch):
    closed = []

    def close(fd):
        closed.append(fd)
        raise OSError(errno.EIO, "lost, and closed all the same")

    owner = disk_owner.Owner(tmp_path)
    fd = owner._fd
    with monkeypatch.context() as patched:
        patched.setattr(os, "close", close)
        with pytest.raises(OSError, match="lost"):
            owner.close()
        owner.close()
    os.close(fd)
    assert closed == [fd]


async def test_data_file_of_a_save_that_is_rolled_back_is_deleted(make_disk, kit, monkeypatch):
    allocate, calls = os.posix_fallocate, []

    def second_fails(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError(errno.EIO, "fails here")
        allocate(*arguments)

    async with kit.opened(make_disk()) as store:
        files = open_files(store.path)
        monkeypatch.setattr(os, "posix_fallocate", second_fails)
        blocks = [kit.block(kit.key(nbytes), nbytes=nbytes) for nbytes in (4096, 65536)]
        with pytest.raises(BackendUnavailable, match="fails here"):
            await store.save(blocks)
        assert names(store.path, "segment-*") == []
        assert open_files(store.path) == files
        assert await store.save(blocks) == 2


def test_log_that_others_keep_locked_is_no_damage():
    error = sqlite3.OperationalError("locking protocol")
    error.sqlite_errorcode = sqlite3.SQLITE_PROTOCOL
    with pytest.raises(BackendUnavailable, match="locks of the index's log"), index_errors():
        raise error
