"""The values that ranks of one engine exchange, as bytes."""

from __future__ import annotations

import pickle
from typing import Any

from kvconnect.connector.ranks.link import MOST_NBYTES

__all__ = ["pickled", "unpickled"]


def pickled(value: object) -> bytes:
    """Returns `value` pickled.

    Other threads run meanwhile: heartbeats continue however large `value` is.

    Raises:
        ValueError: the pickle exceeds `MOST_NBYTES`; pickling stops there.
        Exception: any error of pickling a user's object.
    """
    sink = _Sink()
    pickle.Pickler(sink, protocol=5).dump(value)
    return b"".join(sink.parts)


def unpickled(data: bytes | bytearray) -> Any:
    """Returns the value of which `data` was made, by a rank of this one's own job.

    Other threads run meanwhile, as for `pickled`.

    Raises:
        Exception: any error of unpickling a user's object.
    """
    return pickle.Unpickler(_Source(data)).load()  # noqa: S301  from this job's own ranks


class _Sink:
    """A file that collects and counts written bytes.

    Each write is a Python call, at which other threads can run. `pickle.dumps` holds the
    interpreter's lock until its end.
    """

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._nbytes = 0

    def write(self, part: Any) -> int:
        nbytes = len(part)
        self._nbytes += nbytes
        if self._nbytes > MOST_NBYTES:
            raise ValueError(f"it has over {MOST_NBYTES} bytes, which is all an exchange takes")
        self.parts.append(bytes(part))
        return nbytes


class _Source:
    """A file whose every read is a Python call, at which other threads can run."""

    def __init__(self, data: bytes | bytearray) -> None:
        self._data = memoryview(data)
        self._at = 0

    def read(self, nbytes: int) -> bytes:
        self._at += nbytes
        return bytes(self._data[self._at - nbytes : self._at])

    def readinto(self, into: Any) -> int:
        part = self._data[self._at : self._at + len(into)]
        into[: len(part)] = part
        self._at += len(part)
        return len(part)

    def readline(self) -> bytes:
        rest = bytes(self._data[self._at :])
        line = rest[: rest.find(b"\n") + 1] or rest
        self._at += len(line)
        return line
