"""Files of a disk store, opened by name, and never what others have put in their place.

Who may write to the directory may put a symbolic link there, a FIFO, or a file of their own. A link
would be followed and what it leads to overwritten; a FIFO would be waited for.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from kvconnect.errors import ConfigurationError
from kvconnect.trace import warn_once

__all__ = ["ForeignFile", "expect_own", "is_own", "open_own", "warn_shared"]

# Without waiting for a FIFO to be written to; it makes no difference to files.
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ROOT = 0


class ForeignFile(ConfigurationError):
    """What has the name of a file of the store is a link, no file at all, or a stranger's."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(
            f"disk store: '{path}' is {what}, not a file of this store; "
            f"delete it, or give another directory"
        )


def open_own(path: Path, flags: int) -> int:
    """A descriptor of the store's file `path`; with ``O_CREAT`` made for its owner alone.

    Raises:
        ForeignFile: something else has the name; nothing was read or changed.
        OSError: as `os.open`.
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
    """Raise if there is something at `path`, and it is no file of the store.

    For a program that opens it by its name; who changes it at just that moment is not noticed.

    Raises:
        ForeignFile: it is none.
        OSError: it cannot be looked at.
    """
    try:
        what = _not_own(path.lstat(), path)
    except FileNotFoundError:
        return
    if what is not None:
        raise ForeignFile(path, what)


def is_own(found: os.stat_result, path: Path) -> bool:
    """Whether `found`, which `os.lstat` says of `path`, is a file of the store."""
    return _not_own(found, path) is None


def warn_shared(path: Path) -> None:
    """Warn once of a directory that others may write to: they decide what is found in it.

    Raises:
        OSError: it cannot be looked at.
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
    # Root may act for the owner of a directory, and the other way round.
    if found.st_uid not in {_ROOT, os.geteuid()} and found.st_uid != path.parent.stat().st_uid:
        return f"a file of user {found.st_uid}"
    return None
