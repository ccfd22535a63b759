"""The opening of a disk store's files by name, which refuses files of other users.

A user who may write to the directory could create a symbolic link, a FIFO, or a file of their own
under one of the names. A link would be followed and its target overwritten; opening a FIFO would
block.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from kvconnect.errors import ConfigurationError
from kvconnect.trace import warn_once

# Opening must not wait for the writer of a FIFO; the flag makes no difference to files.
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ROOT = 0


class ForeignFile(ConfigurationError):
    """The error that a name of the store is a link, no regular file, or another user's file."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(
            f"disk store: '{path}' is {what}, not a file of this store; "
            f"delete it, or give another directory"
        )


def open_own(path: Path, flags: int) -> int:
    """Returns a descriptor of the store's file `path`; ``O_CREAT`` makes it for its owner alone.

    Raises:
        ForeignFile: a file of another kind or owner has the name; nothing was read or changed.
        OSError: raised by `os.open`.
    """
    try:
        fd = os.open(path, flags | _FLAGS, 0o600)
    except OSError as error:
        foreign = _foreign(path, error)
        if foreign is None:
            raise
        raise foreign from error
    what = _not_own(os.fstat(fd), path)
    if what is not None:
        os.close(fd)
        raise ForeignFile(path, what)
    return fd


def expect_own(path: Path) -> None:
    """Raises if `path` exists and is no file of the store.

    For a caller that opens the file by its name. A change between check and opening is not noticed.

    Raises:
        ForeignFile: `path` is no file of the store.
        OSError: its status cannot be read.
    """
    try:
        what = _not_own(path.lstat(), path)
    except FileNotFoundError:
        return
    if what is not None:
        raise ForeignFile(path, what)


def is_own(found: os.stat_result, path: Path) -> bool:
    """Returns whether `found`, the result of `os.lstat` for `path`, is a file of the store."""
    return _not_own(found, path) is None


def warn_shared(path: Path) -> None:
    """Warns once of a directory that other users may write to: they could change blocks.

    Raises:
        OSError: its status cannot be read.
    """
    found = path.stat()
    mode = stat.S_IMODE(found.st_mode)
    strange = found.st_uid not in {_ROOT, os.geteuid()} and os.geteuid() != _ROOT
    if mode & _OTHERS_WRITE or strange:
        why = f"belongs to user {found.st_uid}" if strange else f"has mode {mode:04o}"
        warn_once(
            f"disk.shared.{path}",
            f"disk store {path}: others may write to this directory (it {why}), delete what is "
            f"stored and put other things in its place; chmod 700, or give another directory",
        )


def _foreign(path: Path, error: OSError) -> ForeignFile | None:
    if error.errno == errno.ELOOP:
        return ForeignFile(path, "a symbolic link")
    if error.errno in {errno.EISDIR, errno.ENXIO}:  # ENXIO: a socket, or a FIFO without a reader
        return ForeignFile(path, "no regular file")
    return None


def _not_own(found: os.stat_result, path: Path) -> str | None:
    if stat.S_ISLNK(found.st_mode):
        return "a symbolic link"
    if not stat.S_ISREG(found.st_mode):
        return "no regular file"
    # A directory of root may have files of its user, and the reverse.
    if found.st_uid not in {_ROOT, os.geteuid()} and found.st_uid != path.parent.stat().st_uid:
        return f"a file of user {found.st_uid}"
    return None
