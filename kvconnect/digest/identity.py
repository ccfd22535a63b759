"""The state of a file, which shows without a read whether the file changed."""

from __future__ import annotations

import os
from typing import NamedTuple, Self


class FileIdentity(NamedTuple):
    """The identity of a file and its state at one moment.

    A write to a file sets its ctime to the current time, even if its mtime is set back. Two states
    within one tick of the kernel's clock may be equal.

    Attributes:
        device, inode: identify the file.
        size: the size in bytes.
        mtime_ns, ctime_ns: nanoseconds since the epoch.
    """

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, stat: os.stat_result) -> Self:
        """Returns the identity of the file with the state `stat`."""
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)

    @property
    def changed_ns(self) -> int:
        """The time of the last change, in nanoseconds since the epoch."""
        return max(self.mtime_ns, self.ctime_ns)
