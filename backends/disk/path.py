"""The checks of a disk store's path: whether it can be written to, its format and its index."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import time
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvconnect.backends.disk.errors import NO_SPACE
from kvconnect.backends.disk.files.own_file import expect_own, open_own
from kvconnect.backends.disk.format import INDEX_NAME
from kvconnect.errors import BackendUnavailable, ConfigurationError
from kvconnect.trace import count, warn_once

Identity = tuple[int, int]

FORMAT = 1
_FORMAT_NAME = "FORMAT"
_MOST_FORMAT = 4096

# Seconds for another process to end its opening, which may wait for the index's lock.
_OTHERS_S = 10.0
_PAUSE_S = 0.005

_DEFAULT_CAPACITY = 50 << 30
# The bytes that a connection needs for the index's log and shared memory, with a margin.
_INDEX_NBYTES = 256 << 10
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT}


def unwritable(path: Path) -> OSError | None:
    """Returns why the directory `path`, made if needed, cannot be written to; ``None`` if it can.

    Raises:
        ConfigurationError: `path` is not a directory.
        BackendUnavailable: the directory cannot be made, or the disk fails.
    """
    probe = path / f"probe-{uuid.uuid4().hex}"
    try:
        path.mkdir(0o700, parents=True, exist_ok=True)  # its files contain prompts
        probe.touch(0o600, exist_ok=False)
        probe.unlink(missing_ok=True)  # or `remove_probes` did
    except OSError as error:
        # "Exists" is also reported for a directory that is being removed.
        if isinstance(error, NotADirectoryError) or (path.exists() and not path.is_dir()):
            raise ConfigurationError(
                f"disk store: '{path}' is not a directory; give another"
            ) from error
        if error.errno in _READ_ONLY and path.is_dir():
            return error
        raise BackendUnavailable(f"disk store {path}: {error}") from error
    return None


def no_space(path: Path) -> OSError | None:
    """Returns the error if the index in the directory `path` lacks space to grow, or ``None``.

    Tests this with a file, because SQLite reports only that reading or writing failed.
    """
    probe = path / f"probe-{uuid.uuid4().hex}"
    try:
        with probe.open("xb", buffering=0) as file:
            if file.write(bytes(_INDEX_NBYTES)) < _INDEX_NBYTES:
                return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
    except OSError as error:
        return error if error.errno in NO_SPACE else None
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    return None


def remove_probes(path: Path) -> None:
    """Deletes files that processes which died in `unwritable` left in the directory `path`."""
    for probe in path.glob("probe-" + "[0-9a-f]" * 32):
        probe.unlink(missing_ok=True)


def default_capacity(path: Path, present: int) -> int:
    """Returns the default capacity at `path` in bytes, where `present` bytes are stored."""
    # Never below the present bytes, so that opening a URL without a capacity deletes no block.
    return max(present, min(_DEFAULT_CAPACITY, (shutil.disk_usage(path).free + present) // 2))


def identity(path: Path) -> Identity | None:
    """Returns the identity of the index that the directory `path` has now, or ``None``."""
    return _file(f"{path}/{INDEX_NAME}")


def log_identity(path: Path) -> tuple[Identity | None, Identity | None]:
    """Returns the identities of the index's log and shared memory; fixed while it is open.

    A process that deletes a directory in use may remove them from an index that was made meanwhile.
    """
    return _file(f"{path}/{INDEX_NAME}-wal"), _file(f"{path}/{INDEX_NAME}-shm")


@contextmanager
def held(path: Path, *, alone: bool = False) -> Iterator[None]:
    """Keeps other processes from replacing the index of `path`.

    If `alone`, also keeps them from opening or closing it. SQLite finds the log of an index by its
    name when it opens it, and deletes it by its name when it closes the last connection: if the
    index is replaced between, that is another index's log.

    Raises:
        BackendUnavailable: other processes hold it too long.
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
    """Moves the index `damaged` aside, unless another process has done so by now.

    Raises:
        BackendUnavailable, OSError: the damaged index could not be moved.
    """
    with held(path, alone=True):
        if damaged is not None and identity(path) == damaged:
            warn_damaged(path, error)
            set_aside(path)


def warn_damaged(path: Path, error: Exception) -> None:
    """Warns once that the index is damaged, and counts it."""
    count("store.disk.index_damaged")
    warn_once(
        f"disk.damaged.{path}",
        f"disk store {path}: the index is damaged ({error}); it starts empty",
    )


def _file(name: str) -> Identity | None:
    # Called three times by every call of a store: making a `Path` would take as long as the system
    # call.
    try:
        stat = os.lstat(name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return stat.st_dev, stat.st_ino


def _locked(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def set_aside(directory: Path) -> None:
    """Renames a damaged index; replaces the one that was set aside before."""
    path = directory / INDEX_NAME
    path.replace(path.with_name(INDEX_NAME + ".damaged"))
    for suffix in ("-wal", "-shm"):
        path.with_name(INDEX_NAME + suffix).unlink(missing_ok=True)


def _format_text(number: int) -> bytes:
    text = b"kvconnect disk store, format %d" % number
    return text + b", check %08x\n" % zlib.crc32(text)


def check_format(path: Path) -> None:
    """Refuses a directory of another format.

    A damaged mark is ignored, and written again later.
    """
    try:
        fd = open_own(path / _FORMAT_NAME, os.O_RDONLY)
    except FileNotFoundError:
        return
    with os.fdopen(fd, "rb") as mark:
        text = mark.read(_MOST_FORMAT)
    match = re.match(rb"kvconnect disk store, format (\d{1,9}),", text)
    if match and int(match[1]) != FORMAT and text == _format_text(int(match[1])):
        raise ConfigurationError(
            f"disk store: '{path}' has format {int(match[1])}, this version reads format {FORMAT}; "
            f"give another directory, or delete this one"
        )


def write_format(path: Path) -> None:
    """Marks the directory `path` as one of this format.

    Raises:
        ForeignFile: a file of another kind or owner has the mark's name.
        OSError: the mark cannot be written.
    """
    fd = open_own(path / _FORMAT_NAME, os.O_RDWR | os.O_CREAT)
    with os.fdopen(fd, "r+b") as mark:
        found = os.fstat(fd)
        if found.st_uid == os.geteuid() and found.st_mode & 0o077:  # a mark of an older version
            os.fchmod(fd, 0o600)
        if mark.read(_MOST_FORMAT) != _format_text(FORMAT):
            mark.seek(0)
            mark.truncate()
            mark.write(_format_text(FORMAT))


def expect_own_index(path: Path) -> None:
    """Raises if the index, or a file that SQLite finds beside it, is not one of this store.

    Raises:
        ForeignFile: a file is not.
        OSError: the status of a file cannot be read.
    """
    for suffix in ("", "-wal", "-shm", "-journal"):
        expect_own(path / (INDEX_NAME + suffix))
