"""Runs verbs in processes that kill themselves in the middle."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["killed"]

_CONTEXT = multiprocessing.get_context("forkserver")


def killed(verb: str, url: str, path: Path, point: str, count: int) -> None:
    """Runs `verb` until the call number `count` of `point`, where its process is killed."""
    arguments = (verb, url, str(path), point, count, dict(os.environ))
    process = _CONTEXT.Process(target=_run, args=arguments)
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL, process.exitcode


def _run(
    verb: str, url: str, path: str, point: str, count: int, environment: Mapping[str, str]
) -> None:
    os.environ.update(environment)
    from kvconnect import PromptStore
    from kvconnect.backends.guard.store import GuardedBackend
    from kvconnect.operations import archive, drop, frame_reader, import_, pin

    import_._BATCH_BLOCKS = frame_reader._BATCH_NBYTES = 1
    drop._KEYS_PER_DELETE = pin._KEYS_PER_PIN = 2
    owner, name = {
        "add": (archive.ArchiveWriter, "add"),
        "finish": (archive.ArchiveWriter, "finish"),
        "save": (GuardedBackend, "save"),
        "delete": (GuardedBackend, "delete"),
        "pin": (GuardedBackend, "pin"),
    }[point]
    setattr(owner, name, _counted(getattr(owner, name), count))
    store = PromptStore(url)
    match verb:
        case "export":
            store.export(path, everything=True)
        case "import":
            store.import_(path)
        case _:
            getattr(store, verb)(salt="mine")


def _counted(plain: Callable[..., Any], count: int) -> Callable[..., Any]:
    calls = []

    def call(*arguments: object) -> object:
        calls.append(1)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*arguments)

    return call
