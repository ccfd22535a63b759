"""The secret of one user on one machine: made once, for its eyes only."""

from __future__ import annotations

import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvconnect.errors import ConfigurationError
from kvconnect.transfer import local_secret as module
from kvconnect.transfer.local_secret import local_secret
from kvconnect.transfer.secret import SharedSecret


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvconnect" / "transfer.secret"


def test_it_is_made_once_and_found_again(place):
    secret = local_secret()
    assert len(secret) == 64
    SharedSecret(secret)
    assert local_secret() == secret
    assert place.read_text() == secret
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    assert list(place.parent.iterdir()) == [place]


def test_those_that_start_at_the_same_time_have_the_same(place, monkeypatch):
    """All find no file; each makes one, and one of these stays."""
    together = threading.Barrier(8)
    make = module._make

    def slow(path):
        together.wait(60)
        make(path)

    monkeypatch.setattr(module, "_make", slow)
    with ThreadPoolExecutor(8) as pool:
        made = {each.result() for each in [pool.submit(local_secret) for _ in range(8)]}
    assert made == {place.read_text()}
    assert list(place.parent.iterdir()) == [place]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_can_read_is_refused_without_saying_it(place, mode):
    secret = local_secret()
    place.chmod(mode)
    with pytest.raises(ConfigurationError, match="no other user can read; remove it") as refused:
        local_secret()
    assert secret not in str(refused.value)


def test_a_link_and_a_damaged_file_are_refused(place, tmp_path):
    secret = local_secret()
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError, match="give one instead"):
        local_secret()
    place.unlink()
    place.touch(0o600)
    place.write_text(secret[:20])
    with pytest.raises(ConfigurationError, match=r"transfer\.secret: is damaged"):
        local_secret()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_refused(place):
    local_secret()
    os.chown(place, 12345, 12345)
    with pytest.raises(ConfigurationError, match="not a file of this user's"):
        local_secret()


def test_where_none_can_be_kept_it_is_said(monkeypatch, tmp_path):
    (tmp_path / "kvconnect").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigurationError, match="give one instead, the same to all"):
        local_secret()
