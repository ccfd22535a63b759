"""The files that clients send in pieces, until a verb uses them."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from kvconnect.errors import BadFrame
from kvconnect.server.errors import RequestRefused

_IDLE_S = 3600.0
_MOST_FILES = 16


@dataclass(slots=True)
class _Upload:
    """A file that is being sent.

    Attributes:
        file: has no name in any directory, so that nothing is left of it after a kill.
        at: monotonic seconds of the last piece.
        nbytes: that were received.
        lent: true while a verb reads it.
    """

    file: FileIO
    at: float
    nbytes: int = 0
    lent: bool = False


class Uploads:
    """Keeps files on the disk, `max_nbytes` and 16 files at most. Thread-safe.

    A new file takes the room of others, the one that waits longest first. A file that gets no piece
    for `idle_s` is dropped. A file that a verb reads is not dropped.

    Args:
        max_nbytes: the most bytes of all files together.
        idle_s: seconds.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        max_nbytes: int,
        *,
        idle_s: float = _IDLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_nbytes = max_nbytes
        self._idle_s = idle_s
        self._clock = clock
        self._lock = threading.Lock()
        self._files: dict[str, _Upload] = {}  # the one that waits longest first
        self._timer: threading.Timer | None = None
        self._closed = False

    def received(self, name: str) -> int:
        """Returns how many bytes of the file `name` are here; blocks while a piece is written."""
        with self._lock:
            one = self._files.get(name)
            return 0 if one is None or one.lent else one.nbytes

    def append(self, name: str, offset: int, piece: bytes) -> int:
        """Writes `piece` of the file `name` at `offset`, and drops what was behind; blocks.

        Returns:
            How many bytes of it are here.

        Raises:
            RequestRefused: bytes before `offset` are missing (409), the file is too long (413), the
                disk takes no more (507), or a verb reads the file or needs the room (503).
        """
        end = offset + len(piece)
        if end > self._max_nbytes:
            raise RequestRefused(413, f"the file is larger than {self._max_nbytes} bytes")
        with self._lock:
            one = self._files.get(name)
            if one is not None and one.lent:
                raise RequestRefused(503, "the file is being used; try again later")
            there = 0 if one is None else one.nbytes
            if offset > there:
                raise RequestRefused(
                    409, f"offset: {there} bytes are here; go on there", "wrong_offset"
                )
            self._make_room(name, end)
            one = self._files.pop(name, None) or _Upload(_nameless(), 0.0)
            try:
                one.file.seek(offset)
                left = memoryview(piece)
                while left:
                    left = left[one.file.write(left) :]
                one.file.truncate()
            except OSError as error:
                one.file.close()
                raise _no_room(error) from error
            one.nbytes, one.at = end, self._clock()
            self._files[name] = one
            self._watch()
            return end

    @contextmanager
    def taken(self, name: str) -> Iterator[Path]:
        """Lends the path of the file `name`, which is gone afterwards.

        If the verb fails, the file is kept, unless it is bad.

        Raises:
            RequestRefused: there is no such file (404).
        """
        with self._lock:
            one = self._files.get(name)
            if one is None or one.lent:
                raise RequestRefused(404, "file: was not sent; send it first", "no_such_file")
            one.lent = True
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
                one.lent = False
                if not keep or self._closed:
                    self._drop(name)
                else:
                    self._watch()

    def close(self) -> None:
        """Drops all files; those that verbs read are dropped once these end."""
        with self._lock:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
            for name in [name for name, one in self._files.items() if not one.lent]:
                self._drop(name)

    # ------------------------------------------------------------------ with the lock held

    def _make_room(self, name: str, nbytes: int) -> None:
        """Drops other files until `name` may have `nbytes`, and be one of so many."""
        others = {other: one for other, one in self._files.items() if other != name}
        for other in [other for other, one in others.items() if not one.lent]:
            held = sum(one.nbytes for one in others.values())
            if held + nbytes <= self._max_nbytes and len(others) < _MOST_FILES:
                return
            self._drop(other)
            del others[other]
        if sum(one.nbytes for one in others.values()) + nbytes > self._max_nbytes:
            raise RequestRefused(503, "files that are being used take the room; try again later")

    def _drop(self, name: str) -> None:
        self._files.pop(name).file.close()

    def _watch(self) -> None:
        """Starts the timer for the file that waits longest, if there is one and none runs."""
        waiting = [one.at for one in self._files.values() if not one.lent]
        if self._timer is None and waiting and not self._closed:
            left_s = max(0.0, min(waiting) + self._idle_s - self._clock())
            self._timer = threading.Timer(left_s, self._end_idle)
            self._timer.daemon = True
            self._timer.start()

    def _end_idle(self) -> None:
        with self._lock:
            self._timer = None
            now = self._clock()
            for name, one in list(self._files.items()):
                if not one.lent and now - one.at >= self._idle_s:
                    self._drop(name)
            self._watch()


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
