"""The digests and comparisons of earlier processes, kept for the next one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import xxhash

from kvconnect.digest.identity import FileIdentity
from kvconnect.user_cache import cache_directory, is_private, replace_file

_MAX_ENTRIES = 1024
_MAX_NBYTES = 1 << 20
_DIGEST_NBYTES = 32


def user_directory() -> Path | None:
    """Returns the directory of this user's caches; ``None`` for a user without home directory."""
    try:
        return cache_directory()
    except RuntimeError:
        return None


class _KeptLines:
    """A small file of lines with a checksum each, for this user alone; replaced as a whole.

    Keeps 1,024 lines; the oldest are dropped first. Several processes may use the file. One may
    overwrite a line that another adds, which is then computed again. A damaged line is skipped. A
    file that cannot be read or written, or that other users may write, is ignored.

    Args:
        directory: made before the first write, for this user alone; ``None`` stores nothing.
        name: the name of the file.
    """

    def __init__(self, directory: Path | None, name: str) -> None:
        self._path = None if directory is None else directory / name

    def read(self) -> list[bytes]:
        """Returns the texts of all undamaged lines, the oldest first; never raises `OSError`."""
        if self._path is None:
            return []
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as file:
                content = file.read(_MAX_NBYTES) if is_private(descriptor) else b""
        except OSError:
            return []
        lines = (line.rpartition(b" ") for line in content.splitlines())
        return [text for text, _, check in lines if _checksum(text) == check]

    def write(self, texts: Iterable[bytes]) -> None:
        """Replaces all lines by the last 1,024 of `texts`; never raises `OSError`."""
        if self._path is not None:
            lines = [b"%s %s\n" % (text, _checksum(text)) for text in texts]
            with suppress(OSError):
                replace_file(self._path, lines[-_MAX_ENTRIES:])


class DigestCache:
    """The digests of files by identity, kept in the file ``model-digests``.

    Args:
        directory: see `_KeptLines`.
    """

    def __init__(self, directory: Path | None) -> None:
        self._lines = _KeptLines(directory, "model-digests")

    def read(self) -> dict[FileIdentity, bytes]:
        """Returns all valid entries, the oldest first."""
        entries = map(_entry, self._lines.read())
        return dict(entry for entry in entries if entry is not None)

    def add(self, entries: Mapping[FileIdentity, bytes]) -> None:
        """Adds `entries` to the file; never raises `OSError`."""
        if not entries:
            return
        kept = {key: value for key, value in self.read().items() if key not in entries}
        self._lines.write(
            " ".join([*map(str, identity), digest.hex()]).encode()
            for identity, digest in (kept | dict(entries)).items()
        )


class ProvenContents:
    """The pairs of a digest of weights in memory and one of a directory with the same weights.

    The pairs were found by comparisons bit for bit, and are kept in the file ``model-contents``. A
    lost pair costs another comparison.

    Args:
        directory: see `_KeptLines`.
    """

    def __init__(self, directory: Path | None) -> None:
        self._lines = _KeptLines(directory, "model-contents")

    def has(self, content: bytes, directory: bytes) -> bool:
        """Returns whether this pair of digests was added before."""
        return _pair(content, directory) in self._lines.read()

    def add(self, content: bytes, directory: bytes) -> None:
        """Adds a pair of digests to the file; never raises `OSError`."""
        pair, known = _pair(content, directory), self._lines.read()
        if pair not in known:
            self._lines.write([*known, pair])


def _checksum(text: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(text).encode()


def _pair(content: bytes, directory: bytes) -> bytes:
    return f"{content.hex()} {directory.hex()}".encode()


def _entry(text: bytes) -> tuple[FileIdentity, bytes] | None:
    *numbers, digest = text.split(b" ")
    try:
        entry = FileIdentity(*map(int, numbers)), bytes.fromhex(digest.decode())
    except (ValueError, TypeError):  # a version to come may write other fields
        return None
    return entry if len(entry[1]) == _DIGEST_NBYTES else None
