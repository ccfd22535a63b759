"""The file systems that fail on demand: a shim for errors and short transfers, and a small one.

The shim is between Python and the files below one directory. The small file system can be filled
and made read-only; that needs root.
"""

from __future__ import annotations

import _pyio  # type: ignore[import-not-found]  # typeshed leaves it out
import builtins
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, Self, get_args
from unittest.mock import patch

from kvconnect.testing.subject import Unsupported

FileOperation = Literal["open", "read", "write", "sync"]

FILE_OPERATIONS: tuple[FileOperation, ...] = get_args(FileOperation)

_OF_DESCRIPTORS: dict[str, FileOperation] = {
    "read": "read",
    "readv": "read",
    "pread": "read",
    "preadv": "read",
    "write": "write",
    "writev": "write",
    "pwrite": "write",
    "pwritev": "write",
    "ftruncate": "write",
    "posix_fallocate": "write",
    "fsync": "sync",
    "fdatasync": "sync",
}
_OF_PATHS: dict[str, FileOperation] = {"truncate": "write", "replace": "write", "rename": "write"}


class FaultyFilesystem:
    """Makes I/O on files below `directory` fail within the context, for all threads.

    It replaces functions of `os`, the built-in ``open`` and that of aiofiles, so it affects calls
    from Python, but not SQLite or other C libraries. Linux only.

    Attributes:
        hits: the number of operations that failed or were short so far.
    """

    def __init__(self, directory: Path) -> None:
        self._root = str(directory.absolute())
        self._errors: dict[FileOperation, int] = {}
        self._left: dict[FileOperation, int] = {}
        self._short: set[FileOperation] = set()
        self._patches = ExitStack()
        self.hits = 0

    def fail(self, operation: FileOperation, number: int, *, times: int = -1) -> None:
        """Makes each `operation` raise ``OSError(number)``, or only the next `times` ones."""
        self._left[operation] = times
        self._errors[operation] = number

    def short(self, operation: Literal["read", "write"]) -> None:
        """Makes each `operation` move only a part of the requested bytes, at least one."""
        self._short.add(operation)

    def heal(self) -> None:
        """Ends all faults."""
        self._errors.clear()
        self._short.clear()

    def before(self, operation: FileOperation) -> None:
        """Raises the error that is set for `operation`.

        Raises:
            OSError: as set by `fail`.
        """
        number = self._errors.get(operation)
        if number is None or not self._left[operation]:
            return
        self._left[operation] -= 1
        self.hits += 1
        raise OSError(number, os.strerror(number))

    def shorten(self, operation: FileOperation, nbytes: int) -> int:
        """Returns how many of `nbytes` may be moved at once."""
        if operation not in self._short or nbytes < 2:
            return nbytes
        self.hits += 1
        return max(1, nbytes // 3)

    def covers(self, path: object) -> bool:
        """Returns whether `path`, or the file of the descriptor `path`, is below the directory."""
        try:
            if isinstance(path, int):
                name = os.readlink(f"/proc/self/fd/{path}")  # noqa: PTH115 - it is asked often
            else:
                name = os.path.abspath(os.fsdecode(path))  # type: ignore[arg-type]  # noqa: PTH100
        except (OSError, TypeError):
            return False
        return name == self._root or name.startswith(self._root + os.sep)

    def __enter__(self) -> Self:
        for name, operation in _OF_DESCRIPTORS.items():
            if hasattr(os, name):
                self._replace(os, name, self._on_descriptor(getattr(os, name), operation))
        for name, operation in _OF_PATHS.items():
            self._replace(os, name, self._on_path(getattr(os, name), operation))
        self._replace(os, "open", self._on_path(os.open, "open"))
        opener = self._opener(io.open)
        self._replace(io, "open", opener)
        self._replace(builtins, "open", opener)
        aiofiles = sys.modules.get("aiofiles.threadpool")
        if aiofiles is not None:
            self._replace(aiofiles, "sync_open", opener)
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def _replace(self, where: Any, name: str, function: Callable[..., Any]) -> None:
        self._patches.enter_context(patch.object(where, name, function))

    def _on_descriptor(
        self, real: Callable[..., Any], operation: FileOperation
    ) -> Callable[..., Any]:
        def call(fd: int, *arguments: Any, **options: Any) -> Any:
            if (self._errors or self._short) and self.covers(fd):
                self.before(operation)
                arguments = self._shortened(operation, arguments)
            return real(fd, *arguments, **options)

        return call

    def _shortened(self, operation: FileOperation, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if operation not in self._short or not arguments:
            return arguments
        what, *rest = arguments
        if isinstance(what, list | tuple):  # buffers
            part = memoryview(what[0]).cast("B")
            return ([part[: self.shorten(operation, len(part))]], *rest)
        if isinstance(what, int) and operation == "read":
            return (self.shorten(operation, what), *rest)
        if isinstance(what, bytes | bytearray | memoryview):
            part = memoryview(what).cast("B")
            return (part[: self.shorten(operation, len(part))], *rest)
        return arguments

    def _on_path(self, real: Callable[..., Any], operation: FileOperation) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            if self._errors and self.covers(path):
                self.before(operation)
            return real(path, *arguments, **options)

        return call

    def _opener(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(
            file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **options: Any
        ) -> Any:
            if isinstance(file, int) or not self.covers(file):
                return real(file, mode, buffering, *rest, **options)
            # It is written in Python, so its operations call the replaced functions of `os`.
            raw: Any = _pyio.FileIO(file, mode.replace("b", "").replace("t", ""))
            if buffering == 0:
                return raw
            buffered: Any
            if "+" in mode:
                buffered = io.BufferedRandom(raw)
            else:
                buffered = io.BufferedReader(raw) if raw.readable() else io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, *rest, **options)

        return call


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
