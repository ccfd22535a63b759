"""A process that is killed at any moment leaves whole blocks, or none."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from kvconnect.backends.disk import DiskBackend

_PATH = Path(__file__).with_name("saver.py")
_SPEC = importlib.util.spec_from_file_location("saver", _PATH)
saver = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(saver)

NBYTES = 24 << 10
BATCH = 4
POINTS = ["reserved", "written", "committing", "evicted"]


class Server:
    """The fork server, and what its children have told."""

    def __init__(self):
        root = _PATH.parents[2]
        self._process = subprocess.Popen(
            [sys.executable, str(_PATH)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        )
        self._number = 0

    def run(self, path, *, seed, capacity, kill_after_ms=None, blocks=1_000_000, **job):
        """Run a child until it ends or is killed; the numbers of the blocks it acknowledged."""
        self._number += 1
        number = self._number
        job |= {"number": number, "path": str(path), "seed": seed, "capacity": capacity}
        job |= {"nbytes": NBYTES, "batch": BATCH, "blocks": blocks}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        acked, timer = set(), None
        for line in self._process.stdout:
            word, who, *values = line.split()
            assert int(who) == number
            if word == "started" and kill_after_ms is not None:
                kill = (os.kill, (int(values[0]), signal.SIGKILL))
                timer = threading.Timer(kill_after_ms / 1000, *kill)
                timer.start()
            elif word == "acked":
                first, count = map(int, values)
                acked.update(range(first, first + count))
            elif word == "ended":
                break
        if timer is not None:
            timer.cancel()
            timer.join()
        return acked, int(values[0])

    def close(self):
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(30)


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.close()


async def right(store, seed, count):
    """The numbers of the blocks that are stored; fails if one is stored wrong."""
    found = set()
    for number in range(count):
        key = saver.key_of(seed, number)
        into = torch.zeros(NBYTES, dtype=torch.uint8)
        there = await store.lookup([key])
        assert await store.load([key], [into]) == there
        if there:
            assert torch.equal(into, saver.content_of(key, NBYTES)), f"block {number} is wrong"
            found.add(number)
    return found


async def expect_sound(path, capacity, acked_by_seed, *, all_there):
    store = DiskBackend(path, capacity=capacity)
    await store.open([])
    try:
        total = 0
        for seed, acked in acked_by_seed.items():
            found = await right(store, seed, max(acked, default=0) + 3 * BATCH)
            if all_there:
                assert acked <= found
            total += len(found)
        stats = await store.stats()
        files = sum(file.stat().st_size for file in path.glob("segment-*"))
        assert stats["blocks"] == total
        assert stats["file_bytes"] == files <= capacity
        # Nothing is lost for ever: every slot that holds no block can be had again.
        with store._directory._writer._transaction():
            db = store._directory._writer._db
            (free,) = db.execute("SELECT count(*) FROM free").fetchone()
            (fresh,) = db.execute("SELECT coalesce(sum(slots-fresh),0) FROM segments").fetchone()
            (reserved,) = db.execute("SELECT count(*) FROM reserved").fetchone()
            (slots,) = db.execute("SELECT coalesce(sum(slots),0) FROM segments").fetchone()
        assert (reserved, total + free + fresh) == (0, slots)
        assert len(list(path.glob("owner-*"))) == 1
    finally:
        await store.close()
    assert not list(path.glob("owner-*"))


async def kill_and_check(server, path, kills, *, capacity, all_there):
    chance = random.Random(1)
    acked_by_seed = {}
    for seed in range(kills):
        acked, status = server.run(
            path, seed=seed, capacity=capacity, kill_after_ms=chance.uniform(1, 200)
        )
        assert status == signal.SIGKILL
        acked_by_seed[seed] = acked
    assert sum(map(len, acked_by_seed.values())) > 10 * BATCH, "the children hardly ran"
    await expect_sound(path, capacity, acked_by_seed, all_there=all_there)


async def test_acknowledged_blocks_survive_kills_at_any_moment(server, tmp_path):
    path = tmp_path / "store"
    await kill_and_check(server, path, 10, capacity=4 << 30, all_there=True)


async def test_blocks_are_right_or_absent_after_kills_in_a_full_store(server, tmp_path):
    path = tmp_path / "store"
    await kill_and_check(server, path, 10, capacity=2 << 20, all_there=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capacity", [8 << 30, 2 << 20])
async def test_two_hundred_kills(server, tmp_path, capacity):
    path = tmp_path / "store"
    await kill_and_check(server, path, 200, capacity=capacity, all_there=capacity > 1 << 30)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("visits", [1, 3])
async def test_kill_at_a_named_point(server, tmp_path, point, visits):
    path, capacity = tmp_path / "store", 1 << 20
    acked, status = server.run(path, seed=1, capacity=capacity, point=point, visits=visits)
    assert status == signal.SIGKILL
    await expect_sound(path, capacity, {1: acked}, all_there=point != "evicted")
    # And the next process goes on as if nothing had been.
    more, status = server.run(path, seed=2, capacity=capacity, blocks=8)
    assert (len(more), status) == (8, 0)
    await expect_sound(path, capacity, {1: acked, 2: more}, all_there=False)


async def test_what_a_process_saved_is_there_in_the_next(server, tmp_path):
    path = tmp_path / "store"
    acked, status = server.run(path, seed=5, capacity=64 << 20, blocks=40)
    assert (acked, status) == (set(range(40)), 0)
    await expect_sound(path, 64 << 20, {5: acked}, all_there=True)
