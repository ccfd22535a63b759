"""Measures the resources of this process."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path


def descriptors() -> int:
    """Returns how many file descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the names do not matter


def open_files(directory: Path) -> list[str]:
    """Returns the path of each open file below a directory, once for each descriptor.

    Deleted files are included. The paths show what a part of a program leaves open, which the
    number of descriptors cannot: others may be opened and closed meanwhile, by a thread or by the
    garbage collector.
    """
    root, paths = f"{directory.resolve()}/", []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(FileNotFoundError):  # closed meanwhile
            paths.append(os.readlink(f"/proc/self/fd/{name}"))  # noqa: PTH115 - no path: "socket:[1]"
    return sorted(path for path in paths if path.startswith(root))


def resident_nbytes() -> int:
    """Returns how much memory this process uses."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()
