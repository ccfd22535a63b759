"""Bodies of requests and of answers: sent from, and received into, the caller's memory."""

from __future__ import annotations

import http.client
import io
from collections.abc import Iterator, Sequence
from typing import Protocol
from urllib.parse import SplitResult

from botocore.exceptions import ResponseStreamingError

from kvconnect.backends.s3.connections import Connections

__all__ = ["MOST_SAID", "Download", "Upload", "fill"]

# Of answers that are no objects: errors and pages of a listing.
MOST_SAID = 16 << 20
# Views may be of any length; one call of the kernel should not hold a thread for ever.
_SEND_NBYTES = 4 << 20


class Readable(Protocol):
    """A body, whichever library brings it."""

    def readinto(self, view: memoryview, /) -> int:
        """Fill the beginning of `view`; 0 at the end."""


def fill(body: Readable, views: Sequence[memoryview]) -> int:
    """Fill `views` with `body`, one after the other; fewer bytes only where it ends."""
    received = 0
    for view in views:
        filled = 0
        while filled < view.nbytes:
            size = body.readinto(view[filled:])
            if not size:
                return received + filled
            filled += size
        received += filled
    return received


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


class Download:
    """The body of a response.

    Its connection serves other requests once everything was read; else `close` closes it.

    Args:
        connections: which `connection` belongs to.
        connection: it brings the body.
        response: its beginning.
        url: what was asked for.
    """

    def __init__(
        self,
        connections: Connections,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
        *,
        url: SplitResult,
    ) -> None:
        self._connections = connections
        self._connection: http.client.HTTPConnection | None = connection
        self._response = response
        self._url = url

    def readinto(self, view: memoryview) -> int:
        """Fill the beginning of `view`; 0 at the end.

        Raises:
            HTTPClientError: `view` is undefined.
        """
        try:
            size = self._response.readinto(view)
        except (OSError, http.client.HTTPException) as error:
            raise self._failed(error) from error
        self._done_if_read()
        return size

    def read(self, size: int | None = None) -> bytes:
        """Up to `size` bytes, or all.

        Raises:
            HTTPClientError: it broke off.
        """
        try:
            data = self._response.read(size)
        except (OSError, http.client.HTTPException) as error:
            raise self._failed(error) from error
        self._done_if_read()
        return data

    def stream(self) -> Iterator[bytes]:
        """All of it, unless it is longer than what boto3 looks into this way."""
        promised = self._response.length
        if (promised or 0) <= MOST_SAID:
            said = self.read(MOST_SAID + 1 if promised is None else None)
            self._drop()  # not if it was given back
            if len(said) <= MOST_SAID:
                yield said
                return
        raise self._failed(ValueError(f"more than {MOST_SAID} bytes, and no object"))

    def readable(self) -> bool:
        """As of a file."""
        return True

    def close(self) -> None:
        """Let go of the connection."""
        if self._response.length == 0 and self._connection is not None:
            self.read()  # nothing; but now it knows that it is at its end
        self._drop()

    def _failed(self, error: Exception) -> Exception:
        self._drop()
        return self._connections.error(error, self._url.geturl(), ResponseStreamingError)

    def _done_if_read(self) -> None:
        if not self._response.isclosed() or self._connection is None:
            return
        if self._response.will_close or self._response.length:
            self._drop()
        else:
            connection, self._connection = self._connection, None
            self._connections.give_back(self._url, connection)

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._response.close()
            self._connections.drop(connection)
