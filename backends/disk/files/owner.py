"""The users of open resources: processes own slots, threads use files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvconnect.backends.disk.files.own_file import ForeignFile, open_own

_NAME = re.compile(r"owner-([0-9a-f]{32})\.lock")


class Owner:
    """An opening of a store directory, alive as long as it holds the lock on its file.

    The kernel drops the lock when the process dies, however it dies. Process ids are not
    sufficient: they are reused, and have no meaning in another container. Create and list owners
    only inside a write transaction of the index: until its new file is locked, an owner looks
    stopped.

    Raises:
        OSError: the file cannot be made; nothing is left behind.
    """

    def __init__(self, directory: Path) -> None:
        self.name = uuid.uuid4().hex
        self._path = _path(directory, self.name)
        with _forking:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            _living.add(self)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Ends the ownership. A second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
            os.close(fd)

    def leave(self) -> None:
        """Ends the ownership in this forked process only; its parent stays the owner."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


# A forked process shares the lock, which is held until the last of them closes it.
_living: weakref.WeakSet[Owner] = weakref.WeakSet()
_forking = threading.Lock()


def _leave_all() -> None:
    _forking.release()
    for owner in list(_living):
        owner.leave()


os.register_at_fork(
    before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_leave_all
)


def owners(directory: Path) -> set[str]:
    """Returns the names of the owners that are alive; removes the files of the others."""
    found = (_NAME.fullmatch(path.name) for path in directory.iterdir())
    return {match[1] for match in found if match and _alive(directory, match[1])}


def _alive(directory: Path, name: str) -> bool:
    path = _path(directory, name)
    try:
        fd = open_own(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    except ForeignFile:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        path.unlink(missing_ok=True)
        return False
    finally:
        os.close(fd)


def _path(directory: Path, name: str) -> Path:
    return directory / f"owner-{name}.lock"


class Lifetime:
    """A resource that is closed once, when it has ended and is not in use. Thread-safe."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._lock = threading.Lock()
        self._users = 0
        self._ended = False

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keeps the resource open for the duration, even if `end` is called."""
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._ended and not self._users:
                    self._close()

    def end(self) -> None:
        """Closes the resource as soon as it is not in use. A second call does nothing."""
        with self._lock:
            if not self._ended:
                self._ended = True
                if not self._users:
                    self._close()
