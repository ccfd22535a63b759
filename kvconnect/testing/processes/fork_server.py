"""Runs a process that has imported everything, and that forks a child for each job on stdin.

``python -m kvconnect.testing.processes.fork_server`` reads jobs, one JSON object a line, and writes
the children's reports to stdout, one JSON object a line: ``{"job": 1, "started": PID}``, the
reports of the work, ``{"job": 1, "ended": STATUS}``. A child that is forked here starts within
milliseconds, so that it can be killed at a random moment of its work rather than of its imports.
"""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from kvconnect.testing.processes import child_work
from kvconnect.testing.processes.packed import Unguarded, unpack
from kvconnect.testing.subject import Subject

_LINE_NBYTES = 3000  # below PIPE_BUF with its frame, so that lines of two children never mix


Tell: TypeAlias = Callable[[Mapping[str, Any]], None]


def _teller(answers: int, job: int) -> Tell:
    def tell(what: Mapping[str, Any]) -> None:
        line = json.dumps({"job": job, **what}) + "\n"
        os.write(answers, line.encode())  # one write, so that lines never mix

    return tell


def _child(job: dict[str, Any], subject: Subject, tell: Tell) -> None:
    work = getattr(child_work, job["work"])
    status = 1
    tell({"started": os.getpid()})  # not the server: what the child says next would overtake it
    try:
        asyncio.run(work(subject, tell, **job["arguments"]))
        status = 0
    except BaseException:  # noqa: BLE001  the child must not continue as the server
        tell({"error": traceback.format_exc()[-_LINE_NBYTES:]})
    finally:
        os._exit(status)


def _start(job: dict[str, Any], running: dict[int, Tell], tell: Tell) -> None:
    sys.path[:] = job["path"]
    try:
        subject = unpack(bytes.fromhex(job["subject"]))
    except Exception as error:  # noqa: BLE001 - the module is the user's, and may raise anything
        unguarded = isinstance(error, Unguarded)
        tell({"error": str(error) if unguarded else traceback.format_exc()[-_LINE_NBYTES:]})
        tell({"ended": 1 << 8})
        return
    pid = os.fork()
    if not pid:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _child(job, subject, tell)
    running[pid] = tell


def _reap(running: dict[int, Tell]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        running.pop(pid)({"ended": status})


def main() -> None:
    """Serves until stdin ends; then kills the remaining children."""
    torch.set_num_threads(1)
    answers = os.dup(1)
    os.dup2(2, 1)  # the backend's own output must not mix with reports
    readable, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    os.set_blocking(readable, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes stdin
    running: dict[int, Tell] = {}
    waiting = selectors.DefaultSelector()
    waiting.register(0, selectors.EVENT_READ)
    waiting.register(readable, selectors.EVENT_READ)
    text = b""
    while True:
        ready = {key.fd for key, _ in waiting.select()}
        if readable in ready:
            os.read(readable, 4096)
            _reap(running)
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                break
            *lines, text = (text + data).split(b"\n")
            for line in lines:
                job = json.loads(line)
                _start(job, running, _teller(answers, job["job"]))
    for pid in running:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
