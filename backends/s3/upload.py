"""Bytes of several buffers as the body of one request."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

__all__ = ["Upload"]

# Views may be of any length; one call of the kernel should not hold a thread for ever.
_SEND_NBYTES = 4 << 20


class Upload:
    """Bytes of several buffers, one after the other, as boto3 wants a body: no copy is made.

    Args:
        views: of bytes.
    """

    def __init__(self, views: Sequence[memoryview | bytes]) -> None:
        self._views: list[memoryview] = [memoryview(view) for view in views]
        self._nbytes = sum(view.nbytes for view in self._views)
        self._at = 0

    def __len__(self) -> int:
        return self._nbytes

    def chunks(self) -> Iterator[memoryview]:
        """Everything, in pieces."""
        for view in self._views:
            for start in range(0, view.nbytes, _SEND_NBYTES):
                yield view[start : start + _SEND_NBYTES]

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes from where the last call ended; for those who hash or copy."""
        end = self._nbytes if size < 0 else min(self._at + size, self._nbytes)
        parts, start = [], 0
        for view in self._views:
            low, high = max(self._at - start, 0), min(end - start, view.nbytes)
            if low < high:
                parts.append(view[low:high])
            start += view.nbytes
        self._at = end
        return b"".join(parts)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As of a file."""
        self._at = (
            offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._nbytes}[whence]
        )
        return self._at

    def tell(self) -> int:
        """As of a file."""
        return self._at
