"""The pairs of digests that a comparison bit for bit has found to be of the same weights."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import xxhash

from kvconnect.user_cache import cache_directory, is_private, replace_file

__all__ = ["ProvenContents"]

_NAME = "model-contents"
_MAX_ENTRIES = 1024
_MAX_NBYTES = 1 << 20


class ProvenContents:
    """The pairs of a content in memory and its directory: 1,024, the oldest are dropped.

    A small file of this user's. A line that is damaged is passed over, and so is a file that other
    users may write: both cost a comparison.

    Args:
        directory: of the file; ``None``: ``kvconnect`` in the user's cache directory.
    """

    def __init__(self, directory: Path | None = None) -> None:
        with suppress(RuntimeError):  # a user without a home directory
            directory = directory or cache_directory()
        self._path = None if directory is None else directory / _NAME

    def has(self, content: bytes, directory: bytes) -> bool:
        """Returns whether the two digests were found to be of the same weights."""
        return _line(content, directory) in self._lines()

    def add(self, content: bytes, directory: bytes) -> None:
        """Keeps the pair; never raises."""
        line = _line(content, directory)
        if self._path is None or line in (lines := self._lines()):
            return
        with suppress(OSError):
            replace_file(self._path, [*lines, line][-_MAX_ENTRIES:])

    def _lines(self) -> list[bytes]:
        if self._path is None:
            return []
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as file:
                text = file.read(_MAX_NBYTES) if is_private(descriptor) else b""
        except OSError:
            return []
        return [line for line in text.splitlines(keepends=True) if _is_whole(line)]


def _line(content: bytes, directory: bytes) -> bytes:
    text = f"{content.hex()} {directory.hex()}".encode()
    return b"%s %s\n" % (text, xxhash.xxh3_64_hexdigest(text).encode())


def _is_whole(line: bytes) -> bool:
    text, _, check = line.rstrip(b"\n").rpartition(b" ")
    return xxhash.xxh3_64_hexdigest(text).encode() == check
