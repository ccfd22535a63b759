"""Kept digests are found again, and whatever happens to the file costs time only."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from kvconnect.digest import cache as module
from kvconnect.digest.cache import DigestCache
from kvconnect.digest.identity import FileIdentity


def entries(*numbers: int) -> dict[FileIdentity, bytes]:
    return {FileIdentity(1, number, 3, 4, 5): bytes([number]) * 32 for number in numbers}


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """The file with entries 1 and 2."""
    DigestCache(tmp_path / "cache").add(entries(1, 2))
    (file,) = (tmp_path / "cache").iterdir()
    return file


def test_what_was_added_is_found(kept):
    cache = DigestCache(kept.parent)
    assert cache.read() == entries(1, 2)
    cache.add(entries(3))
    assert cache.read() == entries(1, 2, 3)


def test_it_is_for_its_user_alone(kept):
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700


def test_the_oldest_go_first(kept, monkeypatch):
    monkeypatch.setattr(module, "_MAX_ENTRIES", 3)
    cache = DigestCache(kept.parent)
    cache.add(entries(1))
    cache.add(entries(3, 4))
    assert cache.read() == entries(1, 3, 4)


def test_every_flipped_bit_loses_no_more_than_its_line(kept):
    data = kept.read_bytes()
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1
        kept.write_bytes(flipped)
        found = DigestCache(kept.parent).read()
        assert found.items() <= entries(1, 2).items()
        assert len(found) >= 1 or data[at : at + 1] == b"\n"


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\0" * 5000, "é".encode() * 99, b"1 2 3 4 5 ff"])
def test_rubbish_is_no_entry_and_is_replaced(kept, data):
    kept.write_bytes(data)
    cache = DigestCache(kept.parent)
    assert cache.read() == {}
    cache.add(entries(7))
    assert cache.read() == entries(7)


def test_a_file_that_others_may_write_is_not_believed(kept):
    kept.chmod(0o622)
    assert DigestCache(kept.parent).read() == {}


def test_a_link_is_not_followed(kept, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / kept.name).symlink_to(kept)
    assert DigestCache(tmp_path / "other").read() == {}


def test_no_directory_and_one_that_cannot_be_made_keep_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    for directory in (None, tmp_path / "file" / "cache", tmp_path / "file"):
        cache = DigestCache(directory)
        cache.add(entries(1))
        assert cache.read() == {}


def test_nothing_is_left_of_a_write_that_fails(kept, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    DigestCache(kept.parent).add(entries(3))
    assert list(kept.parent.iterdir()) == [kept]
    assert DigestCache(kept.parent).read() == entries(1, 2)
