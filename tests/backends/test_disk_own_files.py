"""A directory that others may write to: what they put in the place of files is not touched."""

from __future__ import annotations

import logging
import os
import stat

import pytest
from test_disk_faults import nothing_was_warned_of  # noqa: F401 - a fixture for all

from kvconnect.backends.disk.format import INDEX_NAME
from kvconnect.errors import ConfigurationError

CONTENT = b"somebody's letters\n" * 400


@pytest.fixture
def letters(tmp_path):
    """A file that has nothing to do with the store; what it holds must stay."""
    file = tmp_path / "letters"
    file.write_bytes(CONTENT)
    yield file
    assert file.read_bytes() == CONTENT


@pytest.mark.parametrize("there", ["new", "filled"])
@pytest.mark.parametrize("name", ["FORMAT", INDEX_NAME, f"{INDEX_NAME}-wal", f"{INDEX_NAME}-shm"])
async def test_symbolic_link_is_not_followed(make_disk, kit, path, letters, name, there):
    if there == "filled":
        async with kit.opened(make_disk()) as store:
            await store.save(kit.chain(kit.keys("link", count=4)))
        (path / name).unlink(missing_ok=True)
    path.mkdir(exist_ok=True)
    (path / name).symlink_to(letters)
    with pytest.raises(ConfigurationError, match=rf"{name}' is a symbolic link.*delete it, or"):
        await make_disk().open([kit.layout])
    (path / name).unlink()
    async with kit.opened(make_disk()) as store:
        assert await store.save(kit.chain(kit.keys("link", count=4))) == 4


async def test_format_that_would_be_written_anew_through_a_link_is_not(make_disk, kit, path):
    """Also where what it leads to is not there yet."""
    path.mkdir()
    (path / "FORMAT").symlink_to(path.parent / "made by nobody")
    with pytest.raises(ConfigurationError, match="symbolic link"):
        await make_disk().open([kit.layout])
    assert not (path.parent / "made by nobody").exists()


@pytest.mark.parametrize("when", ["open", "closed"])
async def test_data_file_that_became_a_link_is_lost_and_its_target_stays(
    make_disk, kit, path, letters, when
):
    keys, more = kit.keys("data file", count=4), kit.keys("more", count=4)
    async with kit.opened(make_disk()) as store:
        await store.save(kit.chain(keys))
        if when == "open":
            swap_segment(path, letters)
            assert await store.save(kit.chain(more)) == 0
            assert await store.save(kit.chain(more)) == 4
            assert await kit.stored(store, [*keys, *more]) == [False] * 4 + [True] * 4
    if when == "closed":
        swap_segment(path, letters)
        async with kit.opened(make_disk()) as store:
            assert await kit.stored(store, keys) == [False] * 4
            assert await store.save(kit.chain(keys)) == 4
    assert not [file for file in path.iterdir() if file.is_symlink()]


def swap_segment(path, letters):
    (segment,) = path.glob("segment-*")
    segment.unlink()
    segment.symlink_to(letters)


@pytest.mark.parametrize("name", ["FORMAT", INDEX_NAME, "segment", "owner-" + "0" * 32 + ".lock"])
@pytest.mark.parametrize("kind", ["fifo", "directory"])
async def test_what_is_no_file_is_not_waited_for(make_disk, kit, path, name, kind):
    keys = kit.keys("kinds", count=4)
    async with kit.opened(make_disk()) as store:
        await store.save(kit.chain(keys))
    planted = next(path.glob("segment-*")) if name == "segment" else path / name
    planted.unlink(missing_ok=True)
    (os.mkfifo if kind == "fifo" else os.mkdir)(planted)
    if name in {"FORMAT", INDEX_NAME}:
        with pytest.raises(ConfigurationError, match="no regular file"):
            await make_disk().open([kit.layout])
    else:
        async with kit.opened(make_disk()) as store:
            assert await kit.stored(store, keys) == [name.startswith("owner")] * 4
            assert await store.save(kit.chain(kit.keys("new", count=4))) == 4


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
@pytest.mark.parametrize("name", ["FORMAT", INDEX_NAME])
async def test_file_of_a_stranger_is_named(make_disk, kit, path, name):
    async with kit.opened(make_disk()):
        pass
    os.chown(path / name, 12345, -1)
    with pytest.raises(ConfigurationError, match=rf"{name}' is a file of user 12345"):
        await make_disk().open([kit.layout])
    os.chown(path, 12345, -1)  # then it belongs to whom the directory belongs to
    async with kit.opened(make_disk()):
        pass


@pytest.mark.parametrize(("mode", "told"), [(0o770, True), (0o1777, True), (0o755, False)])
async def test_directory_that_others_may_write_to_is_warned_of_once(
    make_disk, kit, path, caplog, mode, told
):
    path.mkdir()
    path.chmod(mode)
    with caplog.at_level(logging.WARNING, "kvconnect"):
        for _ in range(2):
            async with kit.opened(make_disk()):
                pass
    warned = [r.getMessage() for r in caplog.records if "others may write" in r.getMessage()]
    assert len(warned) == told
    assert all(f"{mode:04o}" in line and "chmod 700" in line for line in warned)


@pytest.mark.parametrize("there", ["new", "older version's"])
async def test_format_is_for_its_owner_alone(make_disk, kit, path, there):
    before = os.umask(0)
    try:
        async with kit.opened(make_disk()):
            pass
        if there != "new":
            (path / "FORMAT").chmod(0o644)
            async with kit.opened(make_disk()):
                pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((path / "FORMAT").stat().st_mode) == 0o600
