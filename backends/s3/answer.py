"""The beginning of an answer that brings bytes of an object.

Nearly all answers look alike: a status, some headers, a length. Those are understood here, in a
few microseconds; whatever is different in any way is left to Python's HTTP library, which begins
again where the answer began.
"""

from __future__ import annotations

import http.client
import io
import socket
from dataclasses import dataclass
from typing import Any, cast

__all__ = ["PlainAnswer", "receive_head", "resumed"]

_HEAD_NBYTES = 16 << 10
_END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class PlainAnswer:
    """A part of an object is on its way.

    Attributes:
        headers: their names in lower case.
        nbytes: of the body.
        begun: its first bytes, which came with the headers.
    """

    headers: dict[str, str]
    nbytes: int
    begun: bytes

    @classmethod
    def of(cls, data: bytes) -> PlainAnswer | None:
        """What `data` begins; ``None`` unless it is status 206 with all that belongs to it."""
        head, end, begun = data.partition(_END)
        if not end or not head.startswith(b"HTTP/1.1 206 "):
            return None
        lines = head.decode("latin-1").split("\r\n")[1:]
        headers = {}
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon or not name.isascii() or not name.isprintable() or " " in name:
                return None
            if "\n" in value or "\r" in value:
                return None
            headers[name.lower()] = value.strip(" \t")
        length = headers.get("content-length", "")
        if (
            len(headers) != len(lines)  # one comes twice
            or not (length.isascii() and length.isdecimal())
            or not max(1, len(begun)) <= int(length)
            or "transfer-encoding" in headers
            or headers.get("connection", "keep-alive").lower() != "keep-alive"
        ):
            return None
        return cls(headers, int(length), begun)


def receive_head(sock: socket.socket) -> bytes:
    """What came until the headers ended, or until there is more of it than headers are long.

    Raises:
        OSError: nothing came in time, or the connection broke.
    """
    data = sock.recv(_HEAD_NBYTES)
    while data and _END not in data and len(data) < _HEAD_NBYTES:
        more = sock.recv(_HEAD_NBYTES - len(data))
        if not more:
            break
        data += more
    return data


def resumed(sock: socket.socket, data: bytes) -> http.client.HTTPResponse:
    """The answer that `data` begins and `sock` continues, its body not yet read.

    Raises:
        OSError, HTTPException: it is none.
    """
    response = http.client.HTTPResponse(cast("Any", _Begun(sock, data)), method="GET")
    try:
        response.begin()
    except BaseException:
        response.close()
        raise
    return response


class _Begun:
    """What a response wants of a socket."""

    def __init__(self, sock: socket.socket, data: bytes) -> None:
        self._sock = sock
        self._data = data

    def makefile(self, _mode: str) -> io.BufferedReader:
        """All that was received, and what is."""
        return io.BufferedReader(_Stream(self._data, self._sock.makefile("rb", buffering=0)))


class _Stream(io.RawIOBase):
    def __init__(self, data: bytes, rest: io.RawIOBase) -> None:
        self._data = memoryview(data)
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, view: Any) -> int | None:
        if not self._data:
            return cast("int | None", self._rest.readinto(view))
        size = min(len(view), len(self._data))
        view[:size] = self._data[:size]
        self._data = self._data[size:]
        return size

    def close(self) -> None:
        self._rest.close()
        super().close()
