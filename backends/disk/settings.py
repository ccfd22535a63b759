"""Where a disk store is: a directory before it is opened, and what its URL says of it."""

from __future__ import annotations

import errno
import re
import shutil
import uuid
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvconnect.backends.disk.format import Durability
from kvconnect.errors import BackendUnavailable, ConfigurationError

__all__ = [
    "Access",
    "DiskSettings",
    "check_format",
    "default_capacity",
    "remove_probes",
    "unwritable",
    "write_format",
]

FORMAT = 1

Access = Literal["store", "read", "maintain"]
"""What a directory is opened for: to be a store; to be read without leaving a trace, use included;
or to delete from it, whatever its capacity. The latter two do not make one."""

_FORMAT_NAME = "FORMAT"
_DEFAULT_CAPACITY = 50 << 30
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """What a disk store's URL says, see `DiskBackend`, and how long whole blocks are."""

    path: Path
    capacity: int | None = None
    durability: Durability = "process"
    ttl: float | None = None
    frame_sizes: frozenset[int] = frozenset()
    access: Access = "store"


def unwritable(path: Path) -> OSError | None:
    """Why nothing can be written to the directory `path`, which is made if it is not there.

    Raises:
        ConfigurationError: it is not a directory.
        BackendUnavailable: it cannot be made, or the disk fails.
    """
    probe = path / f"probe-{uuid.uuid4().hex}"
    try:
        path.mkdir(0o700, parents=True, exist_ok=True)  # prompts can be read from what is in it
        probe.touch(0o600, exist_ok=False)
        probe.unlink(missing_ok=True)  # or `remove_probes` did
    except OSError as error:
        # "Exists" is also said of a directory that was there and is removed just now.
        if isinstance(error, NotADirectoryError) or (path.exists() and not path.is_dir()):
            raise ConfigurationError(
                f"disk store: '{path}' is not a directory; give another"
            ) from error
        if error.errno in _READ_ONLY and path.is_dir():
            return error
        raise BackendUnavailable(f"disk store {path}: {error}") from error
    return None


def remove_probes(path: Path) -> None:
    """Delete what processes that died in `unwritable` have left in the directory `path`."""
    for probe in path.glob("probe-" + "[0-9a-f]" * 32):
        probe.unlink(missing_ok=True)


def default_capacity(path: Path, present: int) -> int:
    """Bytes that may be stored at `path`, where `present` are stored, if nobody says how many."""
    # Never less than there is: who does not say how much may be stored deletes nothing by that.
    return max(present, min(_DEFAULT_CAPACITY, (shutil.disk_usage(path).free + present) // 2))


def _format_text(number: int) -> bytes:
    text = b"kvconnect disk store, format %d" % number
    return text + b", check %08x\n" % zlib.crc32(text)


def check_format(path: Path) -> None:
    """Refuse a directory of another format. A damaged mark says nothing, and is written again."""
    try:
        text = (path / _FORMAT_NAME).read_bytes()
    except FileNotFoundError:
        return
    match = re.match(rb"kvconnect disk store, format (\d{1,9}),", text)
    if match and int(match[1]) != FORMAT and text == _format_text(int(match[1])):
        raise ConfigurationError(
            f"disk store: '{path}' has format {int(match[1])}, this version reads format {FORMAT}; "
            f"give another directory, or delete this one"
        )


def write_format(path: Path) -> None:
    """Mark the directory `path` as one of this format."""
    mark = path / _FORMAT_NAME
    if not mark.exists() or mark.read_bytes() != _format_text(FORMAT):
        mark.write_bytes(_format_text(FORMAT))
