"""Which index a disk store's directory has, and that it stays that one while it is opened."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvconnect.backends.disk.format import INDEX_NAME, set_aside
from kvconnect.errors import BackendUnavailable
from kvconnect.trace import count, warn_once

__all__ = ["Identity", "held", "identity", "log_identity", "replace_index", "warn_damaged"]

Identity = tuple[int, int]

# For another process to end its opening, which may wait for the index's lock.
_OTHERS_S = 10.0
_PAUSE_S = 0.005


def identity(path: Path) -> Identity | None:
    """Which index the directory `path` has now; ``None``: none."""
    return _file(f"{path}/{INDEX_NAME}")


def log_identity(path: Path) -> tuple[Identity | None, Identity | None]:
    """Which log the index has, and which shared memory: they stay while it is open anywhere.

    A process that deletes a directory in use may take them from an index that was made meanwhile.
    """
    return _file(f"{path}/{INDEX_NAME}-wal"), _file(f"{path}/{INDEX_NAME}-shm")


@contextmanager
def held(path: Path, *, alone: bool = False) -> Iterator[None]:
    """No other process replaces the index of `path` meanwhile, nor, if `alone`, opens or closes it.

    SQLite finds the log of an index by its name when it opens it, and deletes it by its name when
    it closes the last connection: if the index is replaced between, that is another index's log.

    Raises:
        BackendUnavailable: others hold it too long.
        OSError: the directory cannot be opened.
    """
    give_up = time.monotonic() + _OTHERS_S
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while not _locked(fd, fcntl.LOCK_EX if alone else fcntl.LOCK_SH):
            if time.monotonic() > give_up:
                raise BackendUnavailable(f"disk store {path}: another process opens or replaces it")
            time.sleep(_PAUSE_S)
        try:
            yield
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a process that forks now has a copy of `fd`
    finally:
        os.close(fd)


def replace_index(path: Path, damaged: Identity | None, error: Exception) -> None:
    """Move the index out of the way, unless another process has done so by now.

    Raises:
        BackendUnavailable, OSError: it is still there.
    """
    with held(path, alone=True):
        if damaged is not None and identity(path) == damaged:
            warn_damaged(path, error)
            set_aside(path)


def warn_damaged(path: Path, error: Exception) -> None:
    """Say once that the index is not usable."""
    count("store.disk.index_damaged")
    warn_once(
        f"disk.damaged.{path}",
        f"disk store {path}: the index is damaged ({error}); it starts empty",
    )


def _file(name: str) -> Identity | None:
    # Every call of a store asks three times: a `Path` takes as long as the system call does.
    try:
        stat = os.stat(name)  # noqa: PTH116
    except (FileNotFoundError, NotADirectoryError):
        return None
    return stat.st_dev, stat.st_ino


def _locked(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
