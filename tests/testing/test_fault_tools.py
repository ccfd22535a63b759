"""The tools that make a store fail do what they say, and nothing else."""

from __future__ import annotations

import errno
import os
import time

import aiofiles
import pytest

from kvconnect.backends.memory.store import MemoryBackend
from kvconnect.testing import BlockMaker, FaultyBackend, FaultyFilesystem, ShiftedClock


@pytest.fixture
def files(tmp_path):
    (tmp_path / "mine").mkdir()
    with FaultyFilesystem(tmp_path / "mine") as shim:
        yield shim


@pytest.fixture
def mine(files, tmp_path):
    path = tmp_path / "mine" / "file"
    path.write_bytes(bytes(range(256)) * 40)
    return path


# ---------------------------------------------------------------------------------------- files


def test_files_elsewhere_are_left_alone(files, tmp_path):
    for operation in ("open", "read", "write", "sync"):
        files.fail(operation, errno.EIO)
    other = tmp_path / "other"
    other.write_bytes(b"x")
    assert other.read_bytes() == b"x"
    assert not files.hits


@pytest.mark.parametrize("how", ["open", "os", "pathlib"])
def test_reads_and_writes_fail_and_work_again(mine, files, how):
    def read():
        if how == "pathlib":
            return mine.read_bytes()
        if how == "open":
            with open(mine, "rb") as file:  # noqa: PTH123 - the built-in is what is tested
                return file.read()
        fd = os.open(mine, os.O_RDONLY)
        try:
            return os.pread(fd, 1 << 20, 0)
        finally:
            os.close(fd)

    whole = read()
    files.fail("read", errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        read()
    files.heal()
    assert read() == whole
    files.fail("write", errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        mine.write_bytes(b"new")
    files.heal()
    files.fail("open", errno.EMFILE)
    with pytest.raises(OSError, match="Too many open files"):
        read()
    assert files.hits >= 3


def test_only_so_many_fail(mine, files):
    files.fail("read", errno.EINTR, times=2)
    for _ in range(2):
        with pytest.raises(InterruptedError):
            mine.read_bytes()
    assert len(mine.read_bytes()) == 10240


async def test_aiofiles_is_reached(mine, files):
    files.fail("read", errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        async with aiofiles.open(mine, "rb") as file:
            await file.read()


def test_short_transfers_move_a_part(mine, files):
    files.short("read")
    files.short("write")
    with mine.open("r+b", buffering=0) as file:
        assert 0 < len(file.read(3000)) < 3000
        assert 0 < file.write(bytes(3000)) < 3000
    # What loops by itself gets all.
    with mine.open("rb") as file:
        assert len(file.read()) == 10240
    fd = os.open(mine, os.O_RDWR)
    try:
        assert 0 < os.preadv(fd, [bytearray(300), bytearray(300)], 0) < 600
        assert 0 < os.pwritev(fd, [bytes(300), bytes(300)], 0) < 600
    finally:
        os.close(fd)


def test_text_files_work_as_before(files, tmp_path):
    path = tmp_path / "mine" / "text"
    path.write_text("zwölf\n", encoding="utf-8")
    with path.open(encoding="utf-8") as file:
        assert list(file) == ["zwölf\n"]


def test_nothing_is_left_of_the_shim(tmp_path):
    before = (open, os.open, os.pread, os.replace)
    with FaultyFilesystem(tmp_path):
        assert os.pread is not before[2]
    assert (open, os.open, os.pread, os.replace) == before


# ---------------------------------------------------------------------------------------- backend
# That each fault is one: test_every_check_can_fail.py, whose wrong backends it alone finds.


@pytest.fixture
async def faulty():
    store = FaultyBackend(MemoryBackend(1 << 20), delay_s=0.05)
    await store.open([])
    yield store
    await store.close()


@pytest.fixture
async def keys(faulty):
    blocks = BlockMaker()
    keys = blocks.keys(count=2)
    await faulty.save(blocks.chain(keys))
    return keys


async def load(faulty, keys):
    blocks = BlockMaker()
    into = blocks.buffers(2)
    loaded = await faulty.load(keys, into)
    right = [blocks.holds(buffer, key) for buffer, key in zip(into, keys, strict=True)]
    return loaded, right, [blocks.untouched(buffer) for buffer in into]


async def test_without_a_fault_it_is_the_backend(faulty, keys):
    assert await load(faulty, keys) == (2, [True, True], [False, False])
    assert faulty.capabilities.enumerable
    assert not faulty.capabilities.durable


async def test_lies(faulty, keys):
    faulty.set("lie")
    assert await load(faulty, keys) == (2, [False, False], [True, True])
    assert await faulty.lookup([BlockMaker().key("absent")]) == 1
    faulty.set("deny")
    assert await faulty.lookup(keys) == 0
    faulty.set("miscount")
    assert await faulty.lookup(keys) in {-1, 3}


async def test_only_some_operations(keys, faulty):
    some = FaultyBackend(faulty.inner, operations=["save"])
    some.set("raise")
    assert await some.lookup(keys) == 2
    with pytest.raises((OSError, ValueError, KeyError, RuntimeError)):
        await some.save([])
    assert some.hits == 1


# ---------------------------------------------------------------------------------------- clock


def test_the_wall_clock_moves_and_the_monotonic_one_does_not():
    wall, steady = time.time(), time.monotonic()
    with ShiftedClock() as clock:
        clock.forward(1e6)
        assert time.time() - wall >= 1e6
        assert time.time_ns() - int(wall * 1e9) >= 10**15
        assert time.monotonic() - steady < 1e5
        clock.forward(-2e6)
        assert time.time() < wall
    assert abs(time.time() - wall) < 1e4
