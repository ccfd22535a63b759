"""What this process takes of the system."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path

__all__ = ["descriptors", "open_files", "resident_nbytes"]


def descriptors() -> int:
    """How many file descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the names do not matter


def open_files(directory: Path) -> list[str]:
    """The path of each open file below a directory, deleted ones too, once for each descriptor.

    Says what a part of a program leaves open, which their number cannot: others may be opened and
    closed meanwhile, by a thread or by the garbage collector.
    """
    root, paths = f"{directory.resolve()}/", []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(FileNotFoundError):  # closed meanwhile
            paths.append(os.readlink(f"/proc/self/fd/{name}"))  # noqa: PTH115 - no path: "socket:[1]"
    return sorted(path for path in paths if path.startswith(root))


def resident_nbytes() -> int:
    """How much memory this process takes."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()
