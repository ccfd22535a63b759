"""What the directory of a disk store allows, found out before it is opened."""

from __future__ import annotations

import errno
import shutil
import uuid
from pathlib import Path

from kvconnect.errors import BackendUnavailable, ConfigurationError

__all__ = ["default_capacity", "remove_probes", "unwritable"]

_DEFAULT_CAPACITY = 50 << 30
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT}


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
    """Bytes that may be stored at `path`, where `present` are, if the URL does not say how many."""
    # Never less than there is: a URL without a capacity deletes nothing.
    return max(present, min(_DEFAULT_CAPACITY, (shutil.disk_usage(path).free + present) // 2))
