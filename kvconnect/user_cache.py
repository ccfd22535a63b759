"""The directory of this user's cached data."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path


def cache_directory() -> Path:
    """Returns ``kvconnect`` in the user's cache directory: ``XDG_CACHE_HOME``, or ``~/.cache``.

    Raises:
        RuntimeError: this user has no home directory.
    """
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # Relative paths there are ignored, by the XDG specification.
    base = Path(configured) if Path(configured).is_absolute() else Path.home() / ".cache"
    return base / "kvconnect"


def is_private(descriptor: int) -> bool:
    """Returns whether an open file is a regular one that only this user may write."""
    found = os.fstat(descriptor)
    ours = found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return ours and stat.S_ISREG(found.st_mode)


def replace_file(path: Path, parts: Iterable[bytes]) -> None:
    """Writes `parts` to `path` atomically: another process reads the old content or the new.

    Its directory is made for this user alone.

    Raises:
        OSError: `path` is unchanged; its directory may have been made.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            file.writelines(parts)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
