"""A disk that fails costs time, nothing else: results are clear, and it works again after."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import shutil
import subprocess
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
import torch

from kvconnect.backends import open_backend
from kvconnect.backends.disk.files import direct_io
from kvconnect.backends.disk.save import save
from kvconnect.backends.disk.store import DiskBackend
from kvconnect.backends.guard.store import GuardedBackend
from kvconnect.errors import BackendTimeout, BackendUnavailable, ConfigurationError
from kvconnect.testing.processes.usage import open_files
from kvconnect.trace import metrics

FULL = [errno.ENOSPC, errno.EDQUOT, errno.EFBIG]


def failing(number):
    def call(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return call


@pytest.fixture(autouse=True)
def nothing_was_warned_of():
    metrics._warned.clear()


@pytest.fixture
async def store(make_disk, kit):
    async with kit.opened(make_disk()) as backend:
        yield backend


def write_until_full(path):
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def own(records):
    """Those of this package: asyncio tells of what earlier tests left when that is collected."""
    return [one for one in records if one.name.startswith("kvconnect")]


def run(*command):
    subprocess.run(command, check=True)


# ---------------------------------------------------------------------------------------- injected


async def test_failing_write_is_unavailable_stores_nothing_and_keeps_no_slot(
    store, kit, monkeypatch
):
    keys = kit.keys("write", count=4)
    await store.save(kit.chain(keys[:1]))
    monkeypatch.setattr(os, "pwritev", failing(errno.EIO))
    files = (await store.stats())["file_bytes"]
    for _ in range(int(files) // kit.frame_nbytes // 3 + 1):
        with pytest.raises(BackendUnavailable, match=os.strerror(errno.EIO)):
            await store.save(kit.chain(keys))
    assert await store.lookup(keys) == 1
    monkeypatch.undo()
    assert await store.save(kit.chain(keys)) == 4
    assert (await store.stats())["file_bytes"] == files
    assert await kit.stored(store, keys) == [True] * 4


async def test_failed_save_ends_only_when_all_its_writes_have(kit, make_disk, monkeypatch):
    """Until then the buffers are the disk's."""
    failed, held, ended = threading.Event(), threading.Event(), []
    pwritev = os.pwritev

    def write(fd, buffers, offset):
        if offset == 0:
            failed.set()
            raise OSError(errno.EIO, "as if")
        assert held.wait(60)
        ended.append(offset)
        return pwritev(fd, buffers, offset)

    nbytes = 16 << 20
    async with kit.opened(make_disk()) as store:
        monkeypatch.setattr(os, "pwritev", write)
        save = asyncio.create_task(store.save([kit.block(kit.key("large"), nbytes=nbytes)]))
        await asyncio.to_thread(failed.wait, 60)
        assert not (await asyncio.wait({save}, timeout=0.3))[0]
        held.set()
        with pytest.raises(BackendUnavailable, match="as if"):
            await save
        assert ended


async def test_large_block_is_moved_in_parts_and_comes_back_whole(kit, make_disk):
    nbytes = (9 << 20) + 4096
    block = kit.block(kit.key("large"), nbytes=nbytes)
    # The kit's blocks repeat a few bytes, so parts of them are alike.
    block.data.numpy()[:] = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    (into,) = kit.buffers(1, nbytes)
    async with kit.opened(make_disk()) as store:
        assert await store.save([block]) == 1
        assert await store.load([block.key], [into]) == 1
        assert torch.equal(into, block.data)


@pytest.mark.parametrize("number", FULL)
async def test_full_disk_at_a_write_stores_nothing_with_one_warning(
    store, kit, monkeypatch, caplog, number
):
    keys = kit.keys("full", count=4)
    monkeypatch.setattr(os, "pwritev", failing(number))
    with caplog.at_level(logging.WARNING, "kvconnect"):
        for _ in range(5):
            assert await store.save(kit.chain(keys)) == 0
    assert len(own(caplog.records)) == 1
    assert "not saved until there is space" in caplog.text
    monkeypatch.undo()
    assert await store.save(kit.chain(keys)) == 4
    assert await kit.stored(store, keys) == [True] * 4


async def test_disk_that_cannot_grow_reuses_the_slots_it_has(store, kit, monkeypatch, caplog):
    first = kit.keys("first", count=50)
    await store.save(kit.chain(first))
    slots = int((await store.stats())["file_bytes"]) // kit.frame_nbytes
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
    with caplog.at_level(logging.WARNING, "kvconnect"):
        for batch in range(slots // 50 + 2):
            keys = kit.keys("more", batch, count=50)
            assert await store.save(kit.chain(keys)) == 50
            assert await kit.stored(store, keys) == [True] * 50
    assert len(own(caplog.records)) == 1
    assert "drops older blocks" in caplog.text
    assert (await store.stats())["file_bytes"] == slots * kit.frame_nbytes


async def test_filesystem_that_refuses_direct_io_is_read_and_written_buffered(
    kit, make_disk, monkeypatch
):
    def direct(fd):
        return fcntl.fcntl(fd, fcntl.F_GETFL) & direct_io._O_DIRECT

    def refusing(call):
        def transfer(fd, buffers, offset):
            if direct(fd):
                raise OSError(errno.EINVAL, "direct I/O refused")
            return call(fd, buffers, offset)

        return transfer

    monkeypatch.setattr(os, "preadv", refusing(os.preadv))
    monkeypatch.setattr(os, "pwritev", refusing(os.pwritev))
    async with kit.opened(make_disk()) as store:
        keys = kit.keys("buffered", count=6)
        assert await store.save(kit.chain(keys)) == 6
        assert await kit.stored(store, keys) == [True] * 6


async def test_file_that_ends_before_the_slot_is_a_miss(store, kit, monkeypatch):
    keys = kit.keys("short", count=2)
    await store.save(kit.chain(keys))
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    assert await store.load(keys, kit.buffers(2)) == 0
    monkeypatch.undo()
    assert await store.save(kit.chain(keys)) == 2
    assert await kit.stored(store, keys) == [True, True]


async def test_row_that_disappears_while_its_slot_is_read_is_a_miss(store, kit, monkeypatch):
    old, new = kit.keys("old", count=2), kit.keys("new", count=2)
    await store.save(kit.chain(old))
    readv = os.preadv
    other = DiskBackend(store._settings.path, capacity=64 << 20)
    await other.open([kit.layout])
    directory = other._client.directory

    def overtaken(fd, buffers, offset):
        # Another process drops the block and fills its slot with another one.
        directory.delete(old)
        assert save(directory, kit.chain(new)) == 2
        return readv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", overtaken)
    assert await store.load(old, kit.buffers(2)) == 0
    monkeypatch.undo()
    assert await kit.stored(store, new) == [True, True]
    await other.close()


# ---------------------------------------------------------------------------------------- real


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
class TestMounted:
    """On filesystems of its own: small, and read-only."""

    @pytest.fixture
    def mounted(self, tmp_path):
        path = tmp_path / "mounted"
        path.mkdir()
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode:
            pytest.skip(f"cannot mount: {made.stderr.strip()}")
        yield path
        run("umount", "-l", path)

    @staticmethod
    def remount(path, mode):
        run("mount", "-o", f"remount,{mode}", path)

    async def test_filesystem_that_is_full_at_start_is_read_and_takes_blocks_when_there_is_space(
        self, kit, mounted, caplog, monkeypatch
    ):
        monkeypatch.setattr("kvconnect.backends.disk.client._RETRY_S", 0.0)
        keys, more = kit.keys("full", count=4), kit.keys("more", count=2)
        async with kit.opened(DiskBackend(mounted / "store", capacity=1 << 20)) as store:
            await store.save(kit.chain(keys))
        ballast = mounted / "ballast"
        with pytest.raises(OSError, match="No space"):
            write_until_full(ballast)
        with caplog.at_level(logging.WARNING, "kvconnect"):
            async with kit.opened(DiskBackend(mounted / "store", capacity=1 << 20)) as store:
                assert (await store.stats())["read_only"]
                assert await kit.stored(store, keys) == [True] * 4
                assert await store.save(kit.chain(more)) == 0
                assert await kit.stored(store, keys) == [True] * 4
                (warned,) = [record.getMessage() for record in own(caplog.records)]
                assert "cannot be written to (No space left on device)" in warned
                ballast.unlink()
                assert await store.save(kit.chain(more)) == 2
                assert await kit.stored(store, [*keys, *more]) == [True] * 6
                assert not (await store.stats())["read_only"]

    async def test_read_only_directory_is_read_and_saves_store_nothing(
        self, kit, mounted, caplog, monkeypatch
    ):
        monkeypatch.setattr("kvconnect.backends.disk.client._RETRY_S", 0.0)
        keys, more = kit.keys("read only", count=4), kit.keys("more", count=2)
        async with kit.opened(DiskBackend(mounted / "store", capacity=1 << 20)) as store:
            await store.save(kit.chain(keys))
        self.remount(mounted, "ro")
        with caplog.at_level(logging.WARNING, "kvconnect"):
            async with kit.opened(DiskBackend(mounted / "store")) as store:
                assert await kit.stored(store, keys) == [True] * 4
                for _ in range(3):
                    assert await store.save(kit.chain(more)) == 0
                assert await store.save(kit.chain(keys)) == 4
                await store.delete(keys[3:])
                assert await store.lookup(keys) == 3
                assert len(own(caplog.records)) == 1
                assert "nothing is saved" in caplog.text
                self.remount(mounted, "rw")
                assert await store.save(kit.chain(more)) == 2
                assert await kit.stored(store, more) == [True, True]

    async def test_directory_that_turns_read_only_under_way(self, kit, mounted):
        keys = kit.keys("turning", count=4)
        async with kit.opened(open_backend(DiskBackend(mounted / "store"))) as store:
            await store.save(kit.chain(keys))
            # A filesystem with open files cannot be made read-only; a new view of it can.
            run("mount", "--bind", mounted, mounted)
            run("mount", "-o", "remount,bind,ro", mounted)
            try:
                assert await kit.stored(store, keys) == [True] * 4
                with_more = kit.chain(kit.keys("more", count=2))
                with suppress(BackendUnavailable):
                    await store.save(with_more)
                assert await kit.stored(store, keys) == [True] * 4
            finally:
                run("umount", mounted)

    async def test_empty_read_only_directory_is_all_misses(self, kit, mounted):
        (mounted / "store").mkdir()
        self.remount(mounted, "ro")
        async with kit.opened(DiskBackend(mounted / "store")) as store:
            assert await store.lookup([kit.key(1)]) == 0
            assert await store.save([kit.block(kit.key(1))]) == 0
            assert [entry async for entry in store.scan()] == []
            assert (await store.stats())["read_only"]

    async def test_directory_that_cannot_be_made_is_unavailable(self, kit, mounted):
        self.remount(mounted, "ro")
        with pytest.raises(BackendUnavailable, match="Read-only file system"):
            await DiskBackend(mounted / "store").open([kit.layout])


async def test_vanished_data_file_is_a_miss_and_lookups_stop_saying_yes(store, kit, tmp_path):
    keys = kit.keys("data file", count=4)
    await store.save(kit.chain(keys))
    store._client.directory.files.keep_only(())  # as if the blocks came from another process
    for file in (tmp_path / "store").glob("segment-*"):
        file.unlink()
    assert await store.load(keys, kit.buffers(4)) == 0
    assert await store.lookup(keys) == 0
    assert await store.save(kit.chain(keys)) == 4
    assert await kit.stored(store, keys) == [True] * 4


async def test_directory_replaced_by_another_store_is_noticed(store, kit, make_disk, tmp_path):
    mine, theirs = kit.keys("mine", count=2), kit.keys("theirs", count=2)
    await store.save(kit.chain(mine))
    async with kit.opened(DiskBackend(tmp_path / "other", capacity=1 << 20)) as other:
        await other.save(kit.chain(theirs))
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "other").rename(tmp_path / "store")
    assert await kit.stored(store, mine) == [False, False]
    assert await kit.stored(store, theirs) == [True, True]


async def test_path_that_is_a_file_is_named(kit, tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigurationError, match="is not a directory"):
            await DiskBackend(path).open([kit.layout])


async def test_other_files_in_the_directory_are_left_alone(kit, make_disk, tmp_path):
    (tmp_path / "store").mkdir()
    strangers = ["notes.txt", "segment-1.slots", "segment-000001-4096.slots.bak", "owner-me.lock"]
    for name in strangers:
        (tmp_path / "store" / name).write_text("mine")
    async with kit.opened(make_disk(capacity=1 << 20)) as store:
        for batch in range(10):
            await store.save(kit.chain(kit.keys(batch, count=20)))
    assert all((tmp_path / "store" / name).read_text() == "mine" for name in strangers)


# ---------------------------------------------------------------------------------------- leaks


async def test_close_waits_for_a_disk_that_hangs_without_holding_up_anything_else(
    kit, make_disk, monkeypatch
):
    goes_on = threading.Event()
    monkeypatch.setattr(
        "kvconnect.backends.disk.directory.DiskDirectory.lookup",
        lambda self, keys: int(not goes_on.wait(60)),
    )
    store = GuardedBackend(make_disk())
    await store.open([kit.layout])
    store._calls.deadline_s = 0.05
    with pytest.raises(BackendTimeout):
        await store.lookup(kit.keys("hangs", count=1))
    started = time.monotonic()
    await store.close()
    assert time.monotonic() - started < 30
    goes_on.set()


async def test_failed_open_leaves_nothing_open(kit, tmp_path, monkeypatch):
    store = DiskBackend(tmp_path / "store")
    monkeypatch.setattr("kvconnect.backends.disk.writer.Owner", failing(errno.EMFILE))
    with pytest.raises(BackendUnavailable) as raised:
        await store.open([kit.layout])
    assert open_files(tmp_path) == []
    del raised  # what it refers to would have been closed by the garbage collector
    monkeypatch.undo()
    await store.open([kit.layout])
    await store.close()


@pytest.mark.parametrize("part", ["reader", "writer"])
async def test_lost_connection_to_the_index_is_no_damage(store, kit, caplog, part):
    keys = kit.keys("connection", count=3)
    await store.save([kit.block(key) for key in keys[:2]])
    getattr(store._client.directory, part)._db.close()
    await store.save([kit.block(keys[2])])
    assert await store.lookup(keys) == 3
    assert "opened again" in caplog.text
    assert "damaged" not in caplog.text
