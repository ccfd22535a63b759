"""The digests of files that were hashed before, kept for the next process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import xxhash

from kvconnect.digest.identity import FileIdentity
from kvconnect.user_cache import is_private, replace_file

__all__ = ["DigestCache"]

_NAME = "model-digests"
_MAX_ENTRIES = 1024
_MAX_NBYTES = 1 << 20
_DIGEST_NBYTES = 32


class DigestCache:
    """The digests by identity: 1,024 at most, the oldest are dropped first.

    They are kept in one small file, a line for each, which is replaced as a whole. Several
    processes may use it: one may lose what another adds, which costs time. A file that is damaged,
    that cannot be read or written, or that other users may write costs time, too, and is ignored.

    Args:
        directory: made when first written to, for this user alone; ``None``: nothing is kept.
    """

    def __init__(self, directory: Path | None) -> None:
        self._path = None if directory is None else directory / _NAME

    def read(self) -> dict[FileIdentity, bytes]:
        """Returns all valid entries, the oldest first."""
        if self._path is None:
            return {}
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as file:
                text = file.read(_MAX_NBYTES) if is_private(descriptor) else b""
        except OSError:
            return {}
        entries = map(_entry, text.splitlines())
        return dict(entry for entry in entries if entry is not None)

    def add(self, entries: Mapping[FileIdentity, bytes]) -> None:
        """Adds `entries`; never raises."""
        if self._path is None or not entries:
            return
        kept = {key: value for key, value in self.read().items() if key not in entries}
        lines = list(map(_line, (kept | dict(entries)).items()))[-_MAX_ENTRIES:]
        with suppress(OSError):
            replace_file(self._path, lines)


def _line(entry: tuple[FileIdentity, bytes]) -> bytes:
    identity, digest = entry
    text = " ".join([*map(str, identity), digest.hex()]).encode()
    return b"%s %s\n" % (text, xxhash.xxh3_64_hexdigest(text).encode())


def _entry(line: bytes) -> tuple[FileIdentity, bytes] | None:
    text, _, check = line.rpartition(b" ")
    if xxhash.xxh3_64_hexdigest(text).encode() != check:
        return None
    *numbers, digest = text.split(b" ")
    try:
        entry = FileIdentity(*map(int, numbers)), bytes.fromhex(digest.decode())
    except (ValueError, TypeError):  # a version to come may write other fields
        return None
    return entry if len(entry[1]) == _DIGEST_NBYTES else None
