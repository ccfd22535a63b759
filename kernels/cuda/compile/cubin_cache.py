"""Caches compiled kernels on disk, so that each is compiled once for all processes.

A file is the SHA-256 of the cubin and the cubin; its name is the digest of all inputs of the
compiler. Files are written under another name first and renamed, so that a file with a key's name
is complete. A file that was damaged later is replaced: the kernel is compiled again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvconnect.user_cache import cache_directory, replace_file

_DIGEST_NBYTES = 32


def default_directory() -> Path:
    """Returns ``kvconnect/cubins`` in the user's caches: ``XDG_CACHE_HOME``, or ``~/.cache``."""
    return cache_directory() / "cubins"


@dataclass(frozen=True, slots=True)
class CubinKey:
    """The inputs that decide the bytes of a cubin.

    Attributes:
        source: the text that is compiled.
        arch: the architecture, such as ``"sm_90"``.
        compiler: the version of NVRTC.
        options: the compiler's options, in their order.
    """

    source: str
    arch: str
    compiler: str
    options: tuple[str, ...]

    def digest(self) -> str:
        """Returns the digest of all fields as 64 hexadecimal digits."""
        hashed = hashlib.sha256()
        for field in (self.source, self.arch, self.compiler, *self.options):
            data = field.encode()
            hashed.update(len(data).to_bytes(8, "little"))
            hashed.update(data)
        return hashed.hexdigest()


class CubinCache:
    """The cubins by key. Several processes and threads may share a directory.

    If the directory cannot be read or written, kernels are compiled again.

    Args:
        directory: made before the first write; by default `default_directory`.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or default_directory()

    def get(self, key: CubinKey, make: Callable[[], bytes]) -> bytes:
        """Returns the cubin of `key` from the cache, or else calls `make` and stores its result.

        Errors of `make` are raised; nothing is stored then.
        """
        path = self._directory / f"{key.digest()}.cubin"
        kept = _read(path)
        if kept is not None:
            return kept
        cubin = make()
        with suppress(OSError):
            # The device runs the code in this file, so no other user may write it.
            replace_file(path, [hashlib.sha256(cubin).digest(), cubin])
        return cubin


def _read(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, cubin = data[:_DIGEST_NBYTES], data[_DIGEST_NBYTES:]
    return cubin if hashlib.sha256(cubin).digest() == digest else None
