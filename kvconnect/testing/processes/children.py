"""Starts child processes that work on a subject's store, and that can be killed."""

from __future__ import annotations

import atexit
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from kvconnect.testing.check import Violation
from kvconnect.testing.processes.packed import pack, refuse_while_imported
from kvconnect.testing.subject import Subject

Told = dict[str, Any]
"""The report of a child."""

_PATIENCE_S = 180.0


class Child:
    """A child process. Its methods block; call them on a thread.

    Attributes:
        pid: the process id of the process.
        status: its exit status, in the form of `os.waitpid`; ``None`` while it runs.
        told: its reports so far.
    """

    def __init__(self, lines: queue.Queue[Told]) -> None:
        self._lines = lines
        self.told: list[Told] = []
        self.status: int | None = None
        self.pid = 0
        first = self._next()
        self.pid = first.get("started", 0)
        if not self.pid:
            raise Violation(f"a child process cannot make the backend: {first.get('error', first)}")

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends the child a signal."""
        if self.status is None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:  # the child has just ended
                return

    def kill_later(self, seconds: float) -> None:
        """Kills the child after `seconds`."""
        timer = threading.Timer(seconds, self.kill)
        timer.daemon = True
        timer.start()

    def listen(self) -> Iterator[Told]:
        """Yields the child's reports until it ends.

        Raises:
            Violation: the child failed, or sent no report for three minutes and was killed.
        """
        while self.status is None:
            said = self._next()
            if "ended" in said:
                self.status = said["ended"]
                return
            if "error" in said:
                raise Violation(f"a child process failed: {said['error']}")
            self.told.append(said)
            yield said

    def wait(self) -> list[Told]:
        """Returns all reports of the child, once it has ended."""
        for _ in self.listen():
            pass
        return self.told

    def _next(self) -> Told:
        try:
            return self._lines.get(timeout=_PATIENCE_S)
        except queue.Empty:
            if self.pid:
                self.kill()
            raise Violation(f"a child process was silent for {_PATIENCE_S:.0f} s") from None


class _ForkServer:
    """The process that forks the children of this one, and a thread that receives their reports."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvconnect.testing.processes.fork_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(_path()),
                "OMP_NUM_THREADS": "1",
                "PYTHONHASHSEED": "77",
            },
        )
        self._lock = threading.Lock()
        self._jobs: dict[int, queue.Queue[Told]] = {}
        self._number = 0
        self._hearing = threading.Thread(
            target=self._hear, name="kvconnect-fork-server", daemon=True
        )
        self._hearing.start()
        atexit.register(self.close)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def start(self, subject: Subject, work: str, arguments: dict[str, Any]) -> Child:
        packed = pack(subject).hex()
        with self._lock:
            self._number += 1
            # With the path of now: a test runner adds folders of tests as it meets them.
            job = {"job": self._number, "subject": packed, "path": _path(), "work": work}
            job["arguments"] = arguments
            lines = self._jobs[self._number] = queue.Queue()
            stdin = self._process.stdin
            if stdin is None or not self.alive:
                raise Violation("the fork server died")
            stdin.write(json.dumps(job).encode() + b"\n")
            stdin.flush()
        return Child(lines)

    def _hear(self) -> None:
        for line in self._process.stdout or ():
            said = json.loads(line)
            lines = self._jobs.get(said.pop("job"))
            if lines is not None:
                lines.put(said)

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._hearing.join(10)
            self._process.stdout.close()


def _path() -> list[str]:
    """Returns the folders from which this process imports."""
    return [entry or str(Path.cwd()) for entry in sys.path]


@cache
def _server(pid: int) -> _ForkServer:
    return _ForkServer()


def start(subject: Subject, work: str, **arguments: Any) -> Child:
    """Starts the function `work` of `child_work` in a child process. Blocks.

    Raises:
        Unsupported: the subject cannot be made in another process.
        Violation: the subject could not be made there.
    """
    refuse_while_imported()
    return _server(os.getpid()).start(subject, work, arguments)
