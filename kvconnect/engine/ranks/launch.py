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

from kvconnect.engine.ranks.preparation import preparation
from kvconnect.engine.ranks.settings import RankSettings
from kvconnect.errors import RankLost


class FollowerProcesses:
    """A process for each rank but the leader.

    Each process has a pipe to the leader as standard input, and ends when the pipe is closed, at
    the latest at the end of the leader's process. On Linux the kernel kills it then, even if it is
    stopped. The processes have sessions of their own, so that Ctrl-C reaches only the leader, which
    ends them.

    Args:
        settings: the settings of all ranks.
        port: the port of the leader.
    """

    def __init__(self, settings: RankSettings, port: int) -> None:
        self._ended = False
        self._lost: RankLost | None = None
        self._on_lost: Callable[[], None] = lambda: None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        start = json.dumps({"sys_path": sys.path, "port": port, "prepare": preparation()})
        try:
            for rank in range(1, settings.size):
                self._processes[rank] = self._start(rank, settings, start)
        except BaseException:
            self.end(0.0)
            raise

    def _start(self, rank: int, settings: RankSettings, start: str) -> subprocess.Popen[bytes]:
        """Starts a process, on the thread that watches it.

        For the kernel that thread is the parent. It lives until the process ends, whereas the
        caller's thread may end earlier.
        """
        started: Future[subprocess.Popen[bytes]] = Future()

        def run() -> None:
            try:
                process = _started(rank, settings, start)
            except OSError as error:
                started.set_exception(error)
                return
            started.set_result(process)
            self._watch(rank, process)

        threading.Thread(target=run, name=f"kvconnect-follower-{rank}", daemon=True).start()
        return started.result()

    def on_lost(self, do: Callable[[], None]) -> None:
        """Registers `do`, called on another thread when a follower's process ends unexpectedly."""
        self._on_lost = do
        if self._lost is not None:
            do()

    def check(self) -> None:
        """Checks that all processes run.

        Raises:
            RankLost: a process has ended; names its rank.
        """
        if self._lost is not None:
            raise RankLost(self._lost.rank, str(self._lost))

    def end(self, wait_s: float) -> None:
        """Waits up to `wait_s` for the processes to end, and kills the others; idempotent.

        No process runs afterwards.
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
        if self._lost is None:  # only the first one is reported: the others end because of it
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
        stdout=2,  # the output is the user's program's
        env=environment,
        start_new_session=True,
    )
    assert process.stdin is not None  # noqa: S101
    process.stdin.write(f"{start}\n{settings.encode()}\n".encode())
    process.stdin.flush()
    return process
