"""The log of the disk store's index is never long, whatever other processes do to it."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from contextlib import ExitStack, closing, contextmanager

import pytest

from kvconnect.backends.disk import format as disk_format
from kvconnect.backends.disk.format import log_nbytes

CAPACITY = 8 << 20
LIMIT = log_nbytes(CAPACITY)
# What a save of four blocks adds to the log at most, with room to spare.
SAVE = 128 << 10


@pytest.fixture
def log(tmp_path):
    """Bytes of the log as it is."""
    file = tmp_path / "store" / "index.sqlite3-wal"
    return lambda: file.stat().st_size


async def test_log_stays_short_whatever_is_saved(make_disk, kit, log):
    async with kit.opened(make_disk(capacity=CAPACITY)) as store:
        for turn in range(60):
            assert await store.save(kit.chain(kit.keys(turn, count=4))) == 4
            assert log() <= LIMIT + SAVE


@contextmanager
def read_all_the_time(index):
    """One transaction that reads begins before another ends: SQLite alone starts no log over."""
    ended = threading.Event()

    def read():
        with ExitStack() as connections:
            readers = [
                connections.enter_context(closing(sqlite3.connect(index, isolation_level=None)))
                for _ in range(2)
            ]
            while not ended.is_set():
                for reader in readers:
                    if reader.in_transaction:
                        reader.execute("COMMIT")
                    reader.execute("BEGIN")
                    reader.execute("SELECT count(*) FROM blocks").fetchall()
                    ended.wait(0.002)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


async def test_log_stays_short_while_another_process_reads_all_the_time(
    make_disk, kit, log, tmp_path
):
    async with kit.opened(make_disk(capacity=CAPACITY)) as store:
        with read_all_the_time(tmp_path / "store" / "index.sqlite3"):
            for turn in range(60):
                assert await store.save(kit.chain(kit.keys(turn, count=4))) == 4
                assert log() <= 3 * LIMIT + SAVE


async def test_log_does_not_grow_for_ever_while_a_process_that_reads_is_stopped(
    make_disk, kit, log, tmp_path, monkeypatch
):
    monkeypatch.setattr(disk_format, "_BUSY_MS", 1)
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
                assert log() <= 9 * LIMIT + SAVE
            for again in range(20):
                assert await store.lookup(first) == 64
                assert await store.save(kit.chain(kit.keys("full", again, count=64))) == 0
            assert log() <= 9 * LIMIT + SAVE
        assert await store.save(kit.chain(kit.keys("after", count=4))) == 4
        assert log() <= 2 * LIMIT + SAVE


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


async def test_saves_go_on_while_another_process_moves_the_log_and_then_it_is_cut(
    make_disk, kit, log, tmp_path
):
    async with kit.opened(make_disk(capacity=CAPACITY)) as store:
        with moving_elsewhere(tmp_path / "store"):
            turn = 0
            while log() <= 3 * LIMIT:
                turn += 1
                assert await store.save(kit.chain(kit.keys(turn, count=4))) == 4
        assert await store.save(kit.chain(kit.keys("after", count=4))) == 4
        assert log() <= LIMIT
