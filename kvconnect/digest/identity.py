"""What tells whether a file is still the one it was, without reading it."""

from __future__ import annotations

import os
from typing import NamedTuple, Self

__all__ = ["FileIdentity"]


class FileIdentity(NamedTuple):
    """Which file, and in which state.

    A write to a file sets its ctime to now, whatever becomes of its mtime; within one tick
    of the kernel's clock two states may look alike.

    Attributes:
        device, inode: which file.
        size: in bytes.
        mtime_ns, ctime_ns: nanoseconds since the epoch.
    """

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, stat: os.stat_result) -> Self:
        """The identity that `stat` tells."""
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)

    @property
    def changed_ns(self) -> int:
        """When it was changed last."""
        return max(self.mtime_ns, self.ctime_ns)
