"""Processes forked from one that has a disk store open: they hold nothing of it."""

from __future__ import annotations

import os
import signal

import pytest

from kvconnect.backends.disk import path as disk_path
from kvconnect.backends.disk.files.owner import Owner, owners
from kvconnect.backends.disk.path import held

# Python 3.12 warns of threads that a child does not have; these children use none.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def test_process_forked_during_an_opening_does_not_keep_the_index_in_place(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_path, "_OTHERS_S", 0.05)
    stay, end = os.pipe()
    with held(tmp_path):
        child = os.fork()
        if not child:
            os.close(end)
            os.read(stay, 1)
            os._exit(0)
    try:
        with held(tmp_path, alone=True):
            pass
    finally:
        os.close(end)
        os.close(stay)
        os.waitpid(child, 0)


def test_process_that_was_forked_does_not_keep_its_parents_slots(tmp_path):
    """It has a copy of the descriptor whose lock says that the owner lives."""
    ready, tell = os.pipe()
    stay, end = os.pipe()
    parent = os.fork()
    if not parent:  # makes an owner, forks, and is killed
        owner = Owner(tmp_path)
        if not os.fork():
            os.close(end)
            os.write(tell, b"1")
            os.read(stay, 1)
            os._exit(0)
        signal.pause()
        owner.close()
    os.close(stay)
    assert os.read(ready, 1) == b"1"
    assert len(owners(tmp_path)) == 1
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    try:
        assert owners(tmp_path) == set()
    finally:
        for fd in (ready, tell, end):
            os.close(fd)


@pytest.mark.parametrize("closes", [False, True])
def test_owner_lives_on_when_a_process_it_forked_ends(tmp_path, closes):
    owner = Owner(tmp_path)
    child = os.fork()
    if not child:
        if closes:
            owner.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert owners(tmp_path) == {owner.name}
    owner.close()
    assert owners(tmp_path) == set()
