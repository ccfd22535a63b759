"""One directory, and what several processes do to it at the same moment."""

from __future__ import annotations

import ast
import errno
import fcntl
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from disk_index import by_hand

from kvconnect.backends.disk import directory as disk_directory
from kvconnect.backends.disk import format as disk_schema
from kvconnect.backends.disk import path as disk_path
from kvconnect.backends.disk import writer as disk_writer
from kvconnect.backends.disk.directory import DiskDirectory
from kvconnect.backends.disk.errors import IndexDamaged
from kvconnect.backends.disk.files.segments import SegmentFiles
from kvconnect.backends.disk.format import INDEX_NAME, connect_read_only
from kvconnect.backends.disk.path import held, identity, replace_index, unwritable
from kvconnect.backends.disk.save import save
from kvconnect.backends.disk.settings import DiskSettings
from kvconnect.backends.disk.store import DiskBackend
from kvconnect.errors import BackendUnavailable, ConfigurationError

CAPACITY = 1 << 20


@pytest.fixture
def settings(path):
    return DiskSettings(path, capacity=CAPACITY)


def once(action, call):
    """`call`, with `action` before the first time."""
    left = [action]

    def overtaken(*arguments, **options):
        if left:
            left.pop()()
        return call(*arguments, **options)

    return overtaken


LOOK = """
import ast, sqlite3, sys
index, query, values = sys.argv[1:]
print(sqlite3.connect(index).execute(query, ast.literal_eval(values)).fetchall())
"""


def in_another_process(path, query, *values):
    command = [sys.executable, "-c", LOOK, path / INDEX_NAME, query, repr(values)]
    return ast.literal_eval(subprocess.check_output(command, text=True))


# ------------------------------------------------------------------ an index that is replaced


def locks_alone(path):
    """Whether another process could replace the index of `path` now."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        os.close(fd)


def test_no_index_is_replaced_while_it_is_opened_or_closed(path, settings, monkeypatch, lanes):
    """SQLite opens and deletes the log by its name: it would be that of another index."""
    DiskDirectory(settings, lanes).close()
    replaceable = []

    class Watched(sqlite3.Connection):
        def execute(self, *arguments):
            replaceable.append(("opening", locks_alone(path)))
            return super().execute(*arguments)

        def close(self):
            replaceable.append(("closing", locks_alone(path)))
            super().close()

    connect = sqlite3.connect

    def watched(index, **options):
        kind = sqlite3.Connection if index == ":memory:" else Watched
        return connect(index, factory=kind, **options)

    monkeypatch.setattr(sqlite3, "connect", watched)
    directory = DiskDirectory(settings, lanes)
    assert replaceable
    opened, replaceable[:] = set(replaceable), []
    directory.writer.touch({}, {})
    assert replaceable
    assert {free for _, free in replaceable} == {True}
    replaceable.clear()
    directory.close()
    assert opened == {("opening", False)}
    assert ("closing", False) in replaceable
    assert ("closing", True) not in replaceable
    assert locks_alone(path)


def test_who_cannot_replace_an_index_says_so_in_time(path, settings, monkeypatch, lanes):
    monkeypatch.setattr(disk_path, "_OTHERS_S", 0.05)
    DiskDirectory(settings, lanes).close()
    seen = identity(path)
    with held(path), pytest.raises(BackendUnavailable, match="opens or replaces it"):
        replace_index(path, seen, IndexDamaged("as if"))
    assert identity(path) == seen
    with (
        held(path, alone=True),
        pytest.raises(BackendUnavailable, match="opens or replaces it"),
    ):
        DiskDirectory(settings, lanes)
    replace_index(path, seen, IndexDamaged("as if"))
    assert identity(path) is None


@pytest.mark.parametrize("part", ["writer", "directory"])
async def test_directory_made_anew_during_an_opening_is_noticed(
    make_disk, kit, path, monkeypatch, part
):
    """The connections that were opened so far are to an index that nobody else will see."""
    module = sys.modules[f"kvconnect.backends.disk.{part}"]

    def removed():
        shutil.rmtree(path)
        path.mkdir()

    keys = kit.keys("anew", count=2)
    store = make_disk()
    with monkeypatch.context() as patched:
        patched.setattr(module, "connect", once(removed, module.connect))
        try:
            await store.open([kit.layout])
        except BackendUnavailable:
            await store.open([kit.layout])
    async with kit.opened(make_disk()) as other:
        assert await store.save(kit.chain(keys)) == 2
        assert await kit.stored(other, keys) == [True, True]
        assert await kit.stored(store, keys) == [True, True]
    await store.close()


@pytest.mark.parametrize("deleted", [["wal"], ["shm"], ["wal", "shm"]])
async def test_log_that_is_deleted_under_an_index_is_left(make_disk, kit, path, deleted):
    """Who deletes a directory in use deletes the log of an index that was made meanwhile."""
    keys = kit.keys("log", count=2)
    async with kit.opened(make_disk()) as store:
        await store.save(kit.chain(kit.keys("before", count=1)))
        for name in deleted:
            (path / f"{INDEX_NAME}-{name}").unlink()
        assert await store.save(kit.chain(keys)) == 2
        assert await kit.stored(store, keys) == [True, True]
        there = "SELECT count(*) FROM blocks WHERE key IN (?, ?)"
        assert in_another_process(path, there, *keys) == [(2,)]


async def test_save_that_waited_while_the_directory_was_made_anew_stores_there(
    make_disk, kit, path, monkeypatch
):
    keys = kit.keys("waited", count=2)
    async with kit.opened(make_disk()) as store:
        await store.save(kit.chain(kit.keys("before", count=1)))
        reserve = disk_writer.IndexWriter.reserve
        overtaken = once(lambda: shutil.rmtree(path), reserve)
        monkeypatch.setattr(disk_writer.IndexWriter, "reserve", overtaken)
        assert await store.save(kit.chain(keys)) == 2
        async with kit.opened(make_disk()) as other:
            assert await kit.stored(other, keys) == [True, True]


async def test_block_of_a_replaced_directory_is_never_read_from_another_ones_file(
    make_disk, kit, path, tmp_path, monkeypatch
):
    mine, theirs = kit.keys("mine", count=2), kit.keys("theirs", count=2)
    async with kit.opened(make_disk()) as store:
        async with kit.opened(make_disk()) as writer:
            await writer.save(kit.chain(mine))
        async with kit.opened(DiskBackend(tmp_path / "other", capacity=64 << 20)) as other:
            await other.save(kit.chain(theirs))

        def replaced():
            shutil.rmtree(path)
            (tmp_path / "other").rename(path)

        with monkeypatch.context() as patched:
            patched.setattr(SegmentFiles, "_open", once(replaced, SegmentFiles._open))
            assert await kit.stored(store, mine) == [False, False]
        assert await kit.stored(store, theirs) == [True, True]


async def test_blocks_that_another_process_stores_meanwhile_count_as_stored_once(make_disk, kit):
    keys = kit.keys("both", count=4)
    store = make_disk()
    async with kit.opened(make_disk()) as other:
        directory = other._client.directory
        store.at = lambda point: point == "written" and save(directory, kit.chain(keys[:3]))
        async with kit.opened(store):
            assert await store.save(kit.chain(keys)) == 4
            assert await kit.stored(other, keys) == [True] * 4
            assert (await store.stats())["blocks"] == 4
    with by_hand(store.path) as db:
        assert db.execute("SELECT count(*) FROM free").fetchone() == (3,)


async def test_block_whose_slot_may_be_used_again_while_it_is_read_is_not_loaded(
    make_disk, kit, monkeypatch
):
    keys = kit.keys("read", count=3)
    async with kit.opened(make_disk()) as store:
        await store.save(kit.chain(keys))
        writer = store._client.directory.writer
        read = once(lambda: writer.delete(keys[1:2]), SegmentFiles.read)
        monkeypatch.setattr(SegmentFiles, "read", read)
        assert await store.load(keys, kit.buffers(3)) == 1


async def test_slots_that_a_living_process_writes_to_are_not_taken(make_disk, kit):
    store, released, droppable = make_disk(), [], []
    async with kit.opened(make_disk()) as other:
        writer = other._client.directory.writer

        def look(point):
            if point == "written":
                with writer._transaction():
                    slots = writer._slots
                    released.append(slots.release_stopped())
                    droppable.append((slots._coldest(), slots.empty_segments()))

        store.at = look
        async with kit.opened(store):
            assert await store.save(kit.chain(kit.keys("written", count=3))) == 3
    assert released == [0]
    assert droppable == [(None, [])]  # nor is their file dropped


async def test_blocks_whose_slots_another_process_took_are_not_stored(make_disk, kit):
    """It may do so if their writer looked stopped."""
    keys, store = kit.keys("taken", count=3), make_disk()
    async with kit.opened(make_disk()) as other:
        writer = other._client.directory.writer

        def take(point):
            if point == "written":
                with writer._transaction():
                    writer._db.execute("DELETE FROM reserved WHERE slot > 0")

        store.at = take
        async with kit.opened(store):
            assert await store.save(kit.chain(keys)) == 1
            assert await kit.stored(other, keys) == [True, False, False]


# ---------------------------------------------------------------------- looking and beginning


async def test_index_that_is_being_made_is_none_yet(make_disk, kit, path):
    path.mkdir()
    (path / INDEX_NAME).touch()
    looking = make_disk()
    with pytest.raises(ConfigurationError, match="there is none"):
        await looking.open([kit.layout], "read")


async def test_store_that_cannot_write_sees_the_index_that_another_has_made(
    make_disk, kit, path, monkeypatch
):
    keys = kit.keys("later", count=2)
    path.mkdir()
    (path / INDEX_NAME).touch()
    with monkeypatch.context() as patched:
        reason = OSError(errno.EROFS, "read-only")
        patched.setattr(disk_directory, "unwritable", lambda path: reason)
        async with kit.opened(make_disk()) as reads:
            assert await reads.lookup(keys) == 0
            patched.undo()
            async with kit.opened(make_disk()) as store:
                await store.save(kit.chain(keys))
            assert await reads.lookup(keys) == 2


def test_index_whose_locks_are_held_is_not_read_without_them(path, settings, monkeypatch, lanes):
    DiskDirectory(settings, lanes).close()
    monkeypatch.setattr(disk_schema, "_BUSY_S", 0.05)
    with closing(sqlite3.connect(path / INDEX_NAME, isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode=EXCLUSIVE")
        other.execute("PRAGMA journal_mode=DELETE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(BackendUnavailable, match="lock"):
            connect_read_only(path)


def test_directory_that_is_removed_while_it_is_made_may_be_made_later(path, monkeypatch):
    def there_a_moment_ago(self, *arguments, **options):
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(Path, "mkdir", there_a_moment_ago)
    with pytest.raises(BackendUnavailable, match="File exists"):
        unwritable(path)


def test_probe_of_a_process_that_died_is_removed(path, settings, monkeypatch, lanes):
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", lambda self, **options: None)
        unwritable(path)
    assert len(list(path.glob("probe-*"))) == 1
    DiskDirectory(settings, lanes).close()
    assert list(path.glob("probe-*")) == []


def test_probe_that_another_process_removes_is_no_failure(path, monkeypatch):
    touch = Path.touch

    def cleaned(self, *arguments, **options):
        touch(self, *arguments, **options)
        self.unlink()

    monkeypatch.setattr(Path, "touch", cleaned)
    assert unwritable(path) is None
