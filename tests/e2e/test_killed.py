"""SIGKILL at any moment of a save: the next run answers the same, with whatever was saved."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from pathlib import Path

import pytest
from children import answer_twice, serve
from harness import disk_url


def _kill_and_check(
    model: Path, directory: Path, expected: list[int], kills: int, seed: int
) -> None:
    context = multiprocessing.get_context("forkserver")
    rng = random.Random(seed)
    store = disk_url(directory, "8MiB")
    for _ in range(kills):
        here, there = context.Pipe()
        child = context.Process(target=serve, args=(model, store, there))
        child.start()
        assert here.poll(60)
        here.recv()
        # Not a wait for anything: the moment of the kill is the random input of this test.
        here.poll(rng.uniform(0.0, 0.4))
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        checker = context.Process(target=answer_twice, args=(model, store, there))
        checker.start()
        assert here.poll(60)
        for tokens in here.recv():
            assert list(tokens) == expected
        checker.join()
        assert checker.exitcode == 0


def test_killed_while_saving(model: Path, expected: list[int], tmp_path: Path) -> None:
    _kill_and_check(model, tmp_path / "store", expected, kills=2, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_a_hundred_times_while_saving(
    model: Path, expected: list[int], tmp_path: Path
) -> None:
    _kill_and_check(model, tmp_path / "store", expected, kills=100, seed=2)


@pytest.mark.slow  # with blocks instead of engines: tests/backends/test_disk_sharing.py
def test_two_processes_on_one_directory(model: Path, expected: list[int], tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    store = disk_url(tmp_path / "store", "2MiB")  # too small for both: they evict each other's
    pipes = [context.Pipe() for _ in range(2)]
    children = [
        context.Process(target=answer_twice, args=(model, store, there)) for _, there in pipes
    ]
    for child in children:
        child.start()
    for (here, _), child in zip(pipes, children, strict=True):
        assert here.poll(120)
        for tokens in here.recv():
            assert list(tokens) == expected
        child.join()
        assert child.exitcode == 0
