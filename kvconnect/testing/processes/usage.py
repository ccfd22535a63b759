"""What this process takes of the system."""

from __future__ import annotations

import os
import resource
from pathlib import Path

__all__ = ["descriptors", "resident_nbytes"]


def descriptors() -> int:
    """How many file descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the names do not matter


def resident_nbytes() -> int:
    """How much memory this process takes."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()
