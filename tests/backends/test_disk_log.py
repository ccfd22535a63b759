"""The log of the disk store's index: moved beside the saves, and never long."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import wait
from contextlib import closing, contextmanager

import pytest

from kvconnect.backends.disk import log as disk_log
from kvconnect.backends.disk.errors import IndexDamaged
from kvconnect.backends.disk.format import log_nbytes
from kvconnect.backends.disk.log import IndexLog

CAPACITY = 32 << 20
LIMIT = log_nbytes(CAPACITY)
# What a save of four blocks adds to the log at most, with room to spare.
SAVE = 128 << 10


@pytest.fixture
def log(tmp_path):
    """Bytes of the log as it is."""
    file = tmp_path / "store" / "index.sqlite3-wal"
    return lambda: file.stat().st_size


class Gate:
    """As a store's `at`: keeps who comes to a point until it is opened."""

    def __init__(self, point):
        self.point = point
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, point):
        if point == self.point:
            self.reached.set()
            assert self.opened.wait(60)


async def test_log_stays_short_whatever_is_saved(make_disk, kit, log):
    async with kit.opened(make_disk(capacity=CAPACITY)) as store:
        for turn in range(60):
            assert await store.save(kit.chain(kit.keys(turn, count=4))) == 4
            assert log() <= 2 * LIMIT + SAVE


async def save_until_it_moves(store, kit, log, gate):
    turn = 0
    while log() <= LIMIT:
        turn += 1
        assert await store.save(kit.chain(kit.keys(turn, count=4))) == 4
    assert await asyncio.to_thread(gate.reached.wait, 60), "the log was not moved"


async def test_saves_go_on_while_the_log_is_moved(make_disk, kit, log):
    gate = Gate("copied")
    store = make_disk(capacity=CAPACITY)
    store.at = gate
    async with kit.opened(store):
        await save_until_it_moves(store, kit, log, gate)
        keys = kit.keys("meanwhile", count=1)
        assert await store.save(kit.chain(keys)) == 1
        assert await kit.stored(store, keys) == [True]
        gate.opened.set()


async def test_saves_wait_where_the_log_cannot_be_moved_as_fast(make_disk, kit, log):
    gate = Gate("copied")
    store = make_disk(capacity=CAPACITY)
    store.at = gate
    async with kit.opened(store):
        waiting = None
        for turn in range(200):
            waiting = asyncio.create_task(store.save(kit.chain(kit.keys(turn, count=4))))
            if not (await asyncio.wait({waiting}, timeout=0.5))[0]:
                break
            assert log() <= 2 * LIMIT + SAVE, "no save waited"
        gate.opened.set()
        assert await waiting == 4
        assert await store.save(kit.chain(kit.keys("after", count=4))) == 4
        assert log() <= 2 * LIMIT


async def test_log_is_cut_once_it_is_moved(make_disk, kit, log):
    gate = Gate("copied")
    store = make_disk(capacity=CAPACITY)
    store.at = gate
    async with kit.opened(store):
        await save_until_it_moves(store, kit, log, gate)
        gate.opened.set()
        store._directory._writer._log._moving.result(60)
        assert log() <= LIMIT


async def test_log_does_not_grow_for_ever_while_a_process_that_reads_is_stopped(
    make_disk, kit, log, tmp_path, monkeypatch
):
    monkeypatch.setattr(disk_log, "_BUSY_MS", 1)
    async with kit.opened(make_disk(capacity=CAPACITY)) as store:
        first = kit.keys("first", count=64)
        assert await store.save(kit.chain(first, nbytes=128)) == 64
        reader = sqlite3.connect(tmp_path / "store" / "index.sqlite3", isolation_level=None)
        with closing(reader):
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM blocks").fetchall()
            for turn in range(1000):
                if not await store.save(kit.chain(kit.keys(turn, count=64), nbytes=128)):
                    break
                assert log() <= 9 * LIMIT
            for again in range(20):
                assert await store.lookup(first) == 64
                assert await store.save(kit.chain(kit.keys("full", again, count=64))) == 0
            assert log() <= 9 * LIMIT
        assert await store.save(kit.chain(kit.keys("after", count=4))) == 4
        assert log() <= 2 * LIMIT + SAVE


async def test_no_save_moves_the_log_itself(make_disk, kit, log, tmp_path, monkeypatch):
    async with kit.opened(make_disk()) as store:
        monkeypatch.setattr(IndexLog, "bound", lambda self: None)
        size = (tmp_path / "store" / "index.sqlite3").stat().st_size
        turn = 0
        while log() < 5 << 20:  # SQLite by itself would have moved it at 4 MiB
            turn += 1
            await store.save(kit.chain(kit.keys(turn, count=64), nbytes=128))
        assert (tmp_path / "store" / "index.sqlite3").stat().st_size == size


async def test_log_that_cannot_be_moved_is_no_failure_of_a_save(make_disk, kit):
    def damaged(point):
        if point == "copied":
            raise IndexDamaged("as if")

    store = make_disk(capacity=CAPACITY)
    store.at = damaged
    async with kit.opened(store):
        for turn in range(30):
            assert await store.save(kit.chain(kit.keys(turn, count=4))) == 4
        assert await store.lookup(kit.keys(29, count=4)) == 4


# Takes the lock that SQLite has while it moves a log: byte 121 of the shared memory's file.
MOVES = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
fcntl.lockf(file, fcntl.LOCK_EX, 1, 121)
print("moves", flush=True)
sys.stdin.read()
"""


@contextmanager
def moving_elsewhere(store):
    shared = store / "index.sqlite3-shm"
    with subprocess.Popen(
        [sys.executable, "-c", MOVES, shared], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"moves\n"
        yield


async def test_log_is_moved_as_soon_as_another_process_has_ended_its_move(
    make_disk, kit, log, tmp_path, monkeypatch
):
    monkeypatch.setattr(disk_log, "_OTHERS_S", 60.0)
    gate = Gate("copied")
    store = make_disk(capacity=CAPACITY)
    store.at = gate
    async with kit.opened(store):
        with moving_elsewhere(tmp_path / "store"):
            await save_until_it_moves(store, kit, log, gate)
            gate.opened.set()
            moving = store._directory._writer._log._moving
            assert not wait([moving], timeout=0.2).done
            assert log() > LIMIT
        moving.result(60)
        assert log() <= LIMIT
