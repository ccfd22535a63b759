"""Where this user's programs keep what they can make again."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_directory"]


def cache_directory() -> Path:
    """``kvconnect`` where the user keeps caches: ``XDG_CACHE_HOME``, or ``~/.cache``.

    Raises:
        RuntimeError: this user has no home directory.
    """
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # As the XDG specification says, relative paths there mean nothing.
    base = Path(configured) if Path(configured).is_absolute() else Path.home() / ".cache"
    return base / "kvconnect"
