"""Starts the followers as processes that never outlive the leader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from kvconnect.engine.ranks.preparation import preparation
from kvconnect.engine.ranks.settings import RankSettings
from kvconnect.errors import RankLost

__all__ = ["FollowerProcesses"]


class FollowerProcesses:
    """A process for each rank but the leader.

    Each of them has a pipe to the leader as its standard input, and ends when that is closed: at
    the latest when the leader's process ends, in whatever way. On Linux the kernel kills it then,
    also if it is stopped. They are in sessions of their own, so that Ctrl-C reaches the leader
    alone, which ends them.

    Args:
        settings: of all ranks.
        port: of the leader.
    """

    def __init__(self, settings: RankSettings, port: int) -> None:
        self._ended = False
        self._lost: RankLost | None = None
        self._on_lost: Callable[[], None] = _nothing
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        start = json.dumps({"sys_path": sys.path, "port": port, "prepare": preparation()})
        try:
            for rank in range(1, settings.size):
                self._processes[rank] = self._start(rank, partial(_started, rank, settings, start))
        except BaseException:
            self.end(0.0)
            raise

    def _start(
        self, rank: int, start: Callable[[], subprocess.Popen[bytes]]
    ) -> subprocess.Popen[bytes]:
        """Starts a process on the thread that watches it.

        To the kernel the parent is that thread, which lives until the process ends; the caller's
        thread may end earlier.
        """
        started: Future[subprocess.Popen[bytes]] = Future()

        def run() -> None:
            try:
                process = start()
            except OSError as error:
                started.set_exception(error)
                return
            started.set_result(process)
            self._watch(rank, process)

        threading.Thread(target=run, name=f"kvconnect-follower-{rank}", daemon=True).start()
        return started.result()

    def on_lost(self, do: Callable[[], None]) -> None:
        """Registers `do`, called on a thread of this when a process ended unexpectedly."""
        self._on_lost = do
        if self._lost is not None:
            do()

    def check(self) -> None:
        """Checks that all of them run.

        Raises:
            RankLost: one has ended; names it.
        """
        if self._lost is not None:
            raise RankLost(self._lost.rank, str(self._lost))

    def end(self, wait_s: float) -> None:
        """Waits for them for so long, and kills the rest; idempotent.

        None of them runs afterwards.
        """
        self._ended = True
        until = time.monotonic() + wait_s
        for process in self._processes.values():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        for process in self._processes.values():
            process.wait()
            if process.stdin is not None:
                process.stdin.close()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if self._ended:
            return
        how = f"by signal {-code}" if code < 0 else f"with exit status {code}"
        if self._lost is None:  # the first one counts: the others end by its end
            self._lost = RankLost(rank, f"rank {rank} is lost: process {process.pid} ended {how}")
        self._on_lost()


def _started(rank: int, settings: RankSettings, start: str) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    if settings.device == "cpu":  # each of them has its share of the cores
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // settings.size)))
    process = subprocess.Popen(  # noqa: S603  this package
        [sys.executable, "-P", "-m", "kvconnect.engine.ranks", str(rank)],
        stdin=subprocess.PIPE,
        stdout=2,  # what the user's program prints is its own
        env=environment,
        start_new_session=True,
    )
    assert process.stdin is not None  # noqa: S101
    process.stdin.write(f"{start}\n{settings.encode()}\n".encode())
    process.stdin.flush()
    return process


def _nothing() -> None:
    """Does nothing."""
