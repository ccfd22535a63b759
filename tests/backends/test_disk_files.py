"""Data files of the disk store that vanish, or whose making comes to nothing."""

from __future__ import annotations

import os
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
from disk_index import by_hand

from kvconnect.backends.disk.files.segments import SegmentFiles
from kvconnect.backends.disk.format import INDEX_NAME
from kvconnect.backends.disk.slots import SlotAllocator
from kvconnect.errors import BackendUnavailable
from kvconnect.testing.processes.usage import open_files


async def test_save_into_a_file_that_was_deleted_stores_nothing(make_disk, kit):
    """Who deletes a file may die before the commit, and the file stay open elsewhere."""
    keys, more = kit.keys("there", count=8), kit.keys("more", count=4)
    async with kit.opened(make_disk()) as store, kit.opened(make_disk()) as other:
        await store.save(kit.chain(keys))
        await store.delete(keys[:4])
        for file in store.path.glob("segment-*"):
            file.unlink()
        stored = await store.save(kit.chain(more))
        assert await kit.stored(other, more) == [True] * stored + [False] * (4 - stored)
        assert await store.save(kit.chain(more)) == 4
        assert await kit.stored(other, more) == [True] * 4


def test_file_has_no_name_any_more_when_its_bytes_go(tmp_path, monkeypatch, lanes):
    files = SegmentFiles(tmp_path, lanes, writable=True)
    files.create(1, 4096, 2)
    (path,) = tmp_path.glob("segment-*")
    there = []

    def note(call):
        return lambda *arguments: there.append(path.exists()) or call(*arguments)

    for name in ("truncate", "ftruncate"):
        monkeypatch.setattr(os, name, note(getattr(os, name)))
    files.remove(1, 4096)
    assert there == [False]
    files.close()


def test_data_files_that_vanish_while_they_are_counted_count_nothing(tmp_path, monkeypatch, lanes):
    files = SegmentFiles(tmp_path, lanes, writable=True)
    files.create(1, 4096, 2)
    files.create(2, 4096, 2)
    listed = list(tmp_path.iterdir())
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(listed))
    files.remove(1, 4096)
    assert files.nbytes() == 8192
    files.close()


@pytest.fixture
def commit_fails(path, monkeypatch):
    """The commit of a transaction that reserves slots: nothing more fits."""
    reserve = SlotAllocator.reserve
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(*arguments):
        reserve(*arguments)
        log = (path / f"{INDEX_NAME}-wal").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (log, before[1]))

    @contextmanager
    def failing():
        with monkeypatch.context() as patched:
            patched.setattr(SlotAllocator, "reserve", fill)
            try:
                with pytest.raises(BackendUnavailable):
                    yield
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return failing


async def test_data_file_of_a_commit_that_fails_takes_no_space(make_disk, kit, path, commit_fails):
    keys = kit.keys("room", count=2)
    async with kit.opened(make_disk()) as store:
        files = open_files(path)
        with commit_fails():
            await store.save(kit.chain(keys))
        assert sum(file.stat().st_size for file in path.glob("segment-*")) == 0
        assert open_files(path) == files
        assert await store.save(kit.chain(keys)) == 2
        assert await kit.stored(store, keys) == [True, True]


async def test_commit_that_fails_deletes_no_file_that_another_process_made_since(
    make_disk, kit, path, commit_fails, monkeypatch
):
    """Its transaction is over, and the number of its file can be taken."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    undo = SlotAllocator.undo

    def overtaken(*arguments, **options):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        (file,) = path.glob("segment-*")
        file.unlink()
        file.write_bytes(b"another's")
        undo(*arguments, **options)

    async with kit.opened(make_disk()) as store:
        monkeypatch.setattr(SlotAllocator, "undo", overtaken)
        with commit_fails():
            await store.save(kit.chain(kit.keys("room", count=2)))
        assert [file.read_bytes() for file in path.glob("segment-*")] == [b"another's"]


async def test_slot_outside_of_its_data_file_is_not_taken_again(make_disk, kit, path):
    keys = kit.keys("outside", count=8)
    async with kit.opened(make_disk()) as store:
        await store.save(kit.chain(keys))
    with by_hand(path) as db:
        db.execute("UPDATE segments SET slots=5")
    async with kit.opened(make_disk()) as store:
        assert await kit.stored(store, keys) == [True] * 5 + [False] * 3
        for _ in range(2):
            await store.save(kit.chain(keys))
        assert await kit.stored(store, keys) == [True] * 8
