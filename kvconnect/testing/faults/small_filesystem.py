"""A small file system of its own, which can be filled and made read-only. Needs root."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Self

from kvconnect.testing.subject import Unsupported


class SmallFilesystem:
    """Mounts a tmpfs of `nbytes` at `path` within the context.

    Raises:
        Unsupported: it cannot be mounted here.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self.path = Path()

    def make_read_only(self) -> None:
        """Makes it read-only; no file of it may be open."""
        _run("mount", "-o", "remount,ro", str(self.path))

    def __enter__(self) -> Self:
        self.path = Path(tempfile.mkdtemp(prefix="kvconnect-kit-"))
        try:
            _run("mount", "-t", "tmpfs", "-o", f"size={self._nbytes}", "tmpfs", str(self.path))
        except BaseException:
            self.path.rmdir()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        _run("umount", "-l", str(self.path))
        self.path.rmdir()


def _run(*command: str) -> None:
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    except FileNotFoundError as error:
        raise Unsupported(f"cannot mount a small file system: {error}") from error
    if made.returncode:
        raise Unsupported(f"cannot mount a small file system: {made.stderr.strip()}")
