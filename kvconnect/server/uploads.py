"""The file of prompts that a client sends in pieces, until it is imported."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from kvconnect.errors import BadFrame
from kvconnect.server.errors import RequestRefused

__all__ = ["Uploads"]


@dataclass(slots=True)
class _Upload:
    """A file that is being sent.

    Attributes:
        name: that the client gave it.
        file: has no name in any directory, so that nothing is left of it after a kill.
        nbytes: that were received.
    """

    name: str
    file: FileIO
    nbytes: int = 0


class Uploads:
    """Keeps one file at a time, on the disk; that of another name replaces it. Thread-safe.

    Args:
        max_nbytes: of a file.
    """

    def __init__(self, max_nbytes: int) -> None:
        self._max_nbytes = max_nbytes
        self._lock = threading.Lock()
        self._current: _Upload | None = None

    def received(self, name: str) -> int:
        """Returns how many bytes of the file `name` are here; blocks while a piece is written."""
        with self._lock:
            one = self._current
            return one.nbytes if one is not None and one.name == name else 0

    def append(self, name: str, offset: int, piece: bytes) -> int:
        """Writes `piece` of the file `name` at `offset`, and drops what was behind; blocks.

        Returns:
            How many bytes of it are here.

        Raises:
            RequestRefused: bytes before `offset` are missing (409), the file is too long (413), or
                the disk takes no more (507).
        """
        end = offset + len(piece)
        if end > self._max_nbytes:
            raise RequestRefused(413, f"the file is larger than {self._max_nbytes} bytes")
        with self._lock:
            one = self._current
            if one is None or one.name != name:
                if offset:
                    raise _missing(0)
                self._drop()
                one = self._current = _Upload(name, _nameless())
            if offset > one.nbytes:
                raise _missing(one.nbytes)
            try:
                one.file.seek(offset)
                left = memoryview(piece)
                while left:
                    left = left[one.file.write(left) :]
                one.file.truncate()
            except OSError as error:
                self._drop()
                raise _no_room(error) from error
            one.nbytes = end
            return end

    @contextmanager
    def taken(self, name: str) -> Iterator[Path]:
        """Lends the path of the file `name`, which is gone afterwards.

        If the import fails, it is kept, unless the file is bad or another one came meanwhile.

        Raises:
            RequestRefused: there is no such file (404).
        """
        with self._lock:
            one = self._current
            if one is None or one.name != name:
                raise RequestRefused(404, "file: was not sent; send it first", "no_such_file")
            self._current = None
        keep = False
        try:
            yield Path(f"/proc/self/fd/{one.file.fileno()}")
        except (BadFrame, RequestRefused):
            raise
        except BaseException:
            keep = True
            raise
        finally:
            with self._lock:
                if keep and self._current is None:
                    self._current = one
                else:
                    one.file.close()

    def close(self) -> None:
        """Drops the file, if there is one."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._current is not None:
            self._current.file.close()
            self._current = None


def _nameless() -> FileIO:
    """Returns a file without a buffer: after a failed write `close` has nothing left to write."""
    try:
        return tempfile.TemporaryFile(buffering=0)
    except OSError as error:
        raise _no_room(error) from error


def _no_room(error: OSError) -> RequestRefused:
    return RequestRefused(
        507, f"this machine has no room for the file: {error.strerror}", "no_room"
    )


def _missing(nbytes: int) -> RequestRefused:
    return RequestRefused(409, f"offset: {nbytes} bytes are here; go on there", "wrong_offset")
