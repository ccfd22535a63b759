"""A process that has imported everything and forks a child for each job it is told on stdin.

``python -m kvconnect.testing.processes.fork_server`` reads jobs, one JSON object a line, and writes
what the children tell to stdout, one JSON object a line: ``{"job": 1, "started": PID}``, whatever
the work says, ``{"job": 1, "ended": STATUS}``. A child that is forked here starts within
milliseconds, so that it can be killed at a random moment of its work rather than of its imports.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import selectors
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from kvconnect.testing.processes import child_work
from kvconnect.testing.subject import Address, Recipe, Subject

__all__ = ["main", "revive"]

_LINE_NBYTES = 3000  # below PIPE_BUF with what stands around it: lines of two children never mix


def revive(recipe: Recipe) -> Subject:
    """The subject of `recipe`, in this process."""
    kind: Any = attrgetter(recipe.name)(_module(recipe.module, recipe.file))
    subject: Subject = object.__new__(kind)
    for name, value in recipe.state.items():
        if isinstance(value, list):
            setattr(subject, name, _revived(*value))
        else:
            setattr(subject, name, value)
    return subject


def _revived(what: str, first: str, second: str = "") -> Any:
    match what:
        case "path":
            return Path(first)
        case "address":
            return Address(first, int(second))
        case _:
            return attrgetter(second)(import_module(first))


@cache
def _module(name: str, file: str) -> Any:
    with contextlib.suppress(ImportError):
        module = import_module(name)
        if getattr(module, "__file__", None) == file:
            return module
    # A test module, which its runner imported by its path.
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {file}")
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _teller(job: int) -> Callable[[Mapping[str, Any]], None]:
    def tell(what: Mapping[str, Any]) -> None:
        line = json.dumps({"job": job, **what}) + "\n"
        os.write(1, line.encode())  # one write, so that lines never mix

    return tell


def _child(job: dict[str, Any], subject: Subject) -> None:
    tell = _teller(job["job"])
    work = getattr(child_work, job["work"])
    status = 1
    tell({"started": os.getpid()})  # not the server: what the child says next would overtake it
    try:
        asyncio.run(work(subject, tell, **job["arguments"]))
        status = 0
    except BaseException:  # noqa: BLE001 - whatever it is, the child must not go on as the server
        tell({"error": traceback.format_exc()[-_LINE_NBYTES:]})
    finally:
        os._exit(status)


def _start(job: dict[str, Any], running: dict[int, int]) -> None:
    tell = _teller(job["job"])
    try:
        recipe = Recipe(**job["subject"])
        _module(recipe.module, recipe.file)
    except Exception:  # noqa: BLE001 - the module is the user's, and may raise anything
        tell({"error": traceback.format_exc()[-_LINE_NBYTES:]})
        tell({"ended": 1 << 8})
        return
    pid = os.fork()
    if not pid:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _child(job, revive(recipe))
    running[pid] = job["job"]


def _reap(running: dict[int, int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        _teller(running.pop(pid))({"ended": status})


def main() -> None:
    """Serve until stdin ends; then kill the children that are left."""
    torch.set_num_threads(1)
    readable, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    os.set_blocking(readable, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes stdin
    running: dict[int, int] = {}
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
                _start(json.loads(line), running)
    for pid in running:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
