"""Whatever happens to the bytes of a disk store, a load through the guard is right or a miss."""

from __future__ import annotations

import asyncio
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvconnect.backends import open_backend
from kvconnect.backends.disk.store import DiskBackend
from kvconnect.trace import metrics

COUNT = 8


def open_disk(path):
    return open_backend(DiskBackend(path, capacity=16 << 20), deadline_s=10)


@pytest.fixture
def saved(kit, tmp_path):
    """A closed store with `COUNT` blocks, and a function that copies it for one example."""
    chain = kit.keys("integrity", count=COUNT)

    async def fill():
        async with kit.opened(open_disk(tmp_path / "saved")) as store:
            await store.save(kit.chain(chain))

    asyncio.run(fill())

    def copy():
        path = tmp_path / "copy"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(tmp_path / "saved", path)
        return path

    return chain, copy


def only_segment(path):
    (segment,) = path.glob("segment-*")
    return segment


def flip(file, position, change):
    with file.open("r+b") as data:
        data.seek(position)
        byte = data.read(1)[0]
        data.seek(position)
        data.write(bytes([byte ^ change]))


async def expect_right_or_absent(kit, path, chain):
    """Every block is right or absent; what is absent is dropped, and can be saved again."""
    async with kit.opened(open_disk(path)) as store:
        before = metrics.snapshot().get("store.bad_frame", 0)
        found = await kit.stored(store, chain)
        bad = metrics.snapshot().get("store.bad_frame", 0) - before
        assert [bool(await store.lookup([key])) for key in chain] == found
        assert await store.save(kit.chain(chain)) == COUNT
        assert await kit.stored(store, chain) == [True] * COUNT
        assert metrics.snapshot().get("store.bad_frame", 0) - before == bad
    return found


async def expect_usable_again(kit, path, chain):
    """Every block is right or absent, and saving works, once all damage was found.

    Damage to the index may be found at any access, and then everything is absent.
    """
    async with kit.opened(open_disk(path)) as store:
        for _ in range(4):
            await kit.stored(store, chain)
            saved = await store.save(kit.chain(chain))
            if saved == COUNT and await kit.stored(store, chain) == [True] * COUNT:
                return
    pytest.fail("the store does not recover")


@pytest.mark.parametrize("length", [0, 1, 3 * 4096, 5 * 3 * 4096 + 17, COUNT * 3 * 4096 - 1])
def test_cut_segment_is_right_or_absent(kit, saved, length):
    chain, copy = saved
    path = copy()
    with only_segment(path).open("r+b") as file:
        file.truncate(length)
    asyncio.run(expect_right_or_absent(kit, path, chain))


@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_flipped_byte_of_any_other_file_is_right_or_absent(kit, saved, data):
    chain, copy = saved
    path = copy()
    size = (path / "index.sqlite3").stat().st_size
    name = data.draw(st.sampled_from(["index.sqlite3"] * 9 + ["FORMAT"]))
    end = size if name == "index.sqlite3" else (path / name).stat().st_size
    for _ in range(data.draw(st.integers(1, 4))):
        # Half of them where SQLite keeps its structure, not in its unused bytes.
        page = data.draw(st.integers(0, (end - 1) // 4096))
        within = data.draw(st.integers(0, 120) | st.integers(0, 4095))
        flip(path / name, min(end - 1, page * 4096 + within), data.draw(st.integers(1, 255)))
    asyncio.run(expect_usable_again(kit, path, chain))


@pytest.mark.parametrize("name", ["index.sqlite3", "FORMAT", "segment"])
@pytest.mark.parametrize("how", ["removed", "empty", "garbage", "longer"])
def test_file_that_is_not_what_it_was_is_right_or_absent(kit, saved, name, how):
    chain, copy = saved
    path = copy()
    file = only_segment(path) if name == "segment" else path / name
    if how == "removed":
        file.unlink()
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "garbage":
        file.write_bytes(b"\xa5" * file.stat().st_size)
    else:
        with file.open("ab") as end:
            end.write(b"\xa5" * 5000)
    found = asyncio.run(expect_right_or_absent(kit, path, chain))
    assert any(found) == (name == "FORMAT" or how == "longer")
