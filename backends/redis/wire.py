"""The commands and answers on the socket of one connection; bulk bytes are not copied.

Values go from the caller's memory to the socket (``sendmsg``) and from the socket to the caller's
memory (``recv_into``). Small answers are parsed by hiredis. Everything here blocks: it runs on
threads. After any error the connection must be closed: an answer may be half read.
"""

from __future__ import annotations

import re
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import hiredis

from kvconnect.backends.redis.settings import Address
from kvconnect.errors import BackendUnavailable

Bytes: TypeAlias = bytes | memoryview

Reply: TypeAlias = object
"""A reply to a small command: bytes, int, None, a list of these, or a `hiredis.ReplyError`."""

_HOLD_NBYTES = 16 << 10
_MAX_LINE_NBYTES = 8 << 10
# hiredis allocates a list when its length is announced, and Python's garbage collector then
# traverses all of it while all threads wait.
_HUGE = re.compile(rb"\r\n[*%~>|]\d{7}")
_HUGE_NBYTES = 9  # bytes of such a text, except its last
_MAX_LENGTH_NBYTES = 32  # bytes of a line with the length of a value
_MAX_BULK_NBYTES = 512 << 20
_MAX_REPLIES_NBYTES = 64 << 20  # small answers requested at once
_SLOWEST_NBYTES = 16 << 10  # the least bytes in `timeout` seconds
_MAX_BUFFERS = 512  # in one sendmsg; the system's limit is 1024
# On this host, bytes that wait are still in the processor's cache when they are received. For
# other hosts the system chooses the size of the buffer.
_LOCAL_SEND_NBYTES = 208 << 10


class Wire:
    """The two directions of one connection.

    Args:
        sock: connected, nothing unread on it. Plain sockets are made blocking, with the system's
            own timeout, so that one call reads a whole value.
        server: the server at the other end of `sock`.
        timeout: seconds within which at least `_SLOWEST_NBYTES` must pass; otherwise the connection
            has failed.
        alone: true if no other connection to the server fetches values now.

    Attributes:
        server, alone: the arguments.
    """

    def __init__(
        self,
        sock: socket.socket,
        server: Address,
        timeout: float,
        alone: Callable[[], bool] = lambda: True,
    ) -> None:
        self.server = server
        self.alone = alone
        self._sock = sock
        self._timeout = timeout
        self._plain = not isinstance(sock, ssl.SSLSocket)
        self._wait_all = socket.MSG_WAITALL if self._plain else 0
        self._hold = memoryview(bytearray(_HOLD_NBYTES))
        self._start = self._end = 0
        self._since = self._received = 0.0  # when it was last counted anew, and bytes since then
        self._fed = b"\r\n"  # the end of what was parsed last
        self._reader = hiredis.Reader(protocolError=BackendUnavailable)
        if self._plain:
            sock.settimeout(None)
            limit = struct.pack("@ll", int(timeout), int(timeout % 1 * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            if _is_local(sock):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_SEND_NBYTES)
        else:
            sock.settimeout(timeout)

    def send(self, buffers: Sequence[Bytes]) -> None:
        """Sends all of `buffers`, one after the other.

        Raises:
            OSError: the server received no byte for `timeout` seconds, or the connection is lost.
        """
        self._since, self._received = time.monotonic(), 0
        if not self._plain:
            self._send_encrypted(buffers)
            return
        left = [memoryview(data) for data in buffers if len(data)]
        at = 0
        while at < len(left):
            try:
                sent = self._sock.sendmsg(left[at : at + _MAX_BUFFERS])
            except BlockingIOError as error:
                raise self._too_slow() from error
            nbytes = sum(view.nbytes for view in left[at : at + _MAX_BUFFERS])
            if sent < min(nbytes, _SLOWEST_NBYTES):
                raise self._too_slow()  # it returns early only at its timeout
            while at < len(left) and sent >= left[at].nbytes:
                sent -= left[at].nbytes
                at += 1
            if sent:
                left[at] = left[at][sent:]

    def replies(self, count: int) -> list[Reply]:
        """Returns the next `count` small answers; errors among them are returned, not raised."""
        found: list[Reply] = []
        nbytes = 0
        while len(found) < count:
            try:
                reply = self._reader.gets()
            except TypeError as error:  # a map whose keys cannot be keys
                raise self._garbled(str(error)) from error
            if reply is not False:
                found.append(reply)
                continue
            if nbytes > _MAX_REPLIES_NBYTES:
                raise self._garbled("the server sent small answers without end")
            if self._start == self._end:
                self._fill()
            nbytes += self._feed()
        return found

    def line(self) -> bytes:
        """Returns the next line, without its end."""
        searched = 0
        while True:
            ready = bytes(self._hold[self._start + searched : self._end])
            found = ready.find(b"\r\n")
            if found >= 0:
                line = bytes(self._hold[self._start : self._start + searched + found])
                self._start += len(line) + 2
                return line
            searched = max(0, self._end - self._start - 1)  # its end may be torn apart
            if searched > _MAX_LINE_NBYTES:
                raise self._garbled("the server sent a line without end")
            self._fill()

    def bulk_nbytes(self) -> int | hiredis.ReplyError | None:
        """Returns the length of the value that follows, ``None`` if there is none, or the error."""
        line = self.line()
        if line.startswith(b"-"):
            return hiredis.ReplyError(line[1:].decode("utf-8", "replace"))
        if not line.startswith(b"$") or not line[1:].removeprefix(b"-").isdigit():
            raise self._garbled(f"{line[:32]!r} where a value was due")
        if len(line) > _MAX_LENGTH_NBYTES:
            raise self._garbled("the server announced a value of an impossible length")
        nbytes = int(line[1:])
        if nbytes == -1:
            return None
        if not 0 <= nbytes <= _MAX_BULK_NBYTES:
            raise self._garbled(f"a value of {nbytes} bytes")
        return nbytes

    def exactly(self, nbytes: int) -> bytes:
        """Returns the next `nbytes` bytes; for small numbers."""
        data = bytearray(nbytes)
        self.into(memoryview(data))
        return bytes(data)

    def into(self, view: memoryview) -> None:
        """Fills `view` with the next bytes."""
        at = 0
        while at < len(view):
            if self._start == self._end:
                if len(view) - at >= _HOLD_NBYTES:
                    at += self._receive(view[at:], self._wait_all)
                    continue
                self._fill()  # with the bytes after it in the same call
            step = min(len(view) - at, self._end - self._start)
            view[at : at + step] = self._hold[self._start : self._start + step]
            self._start += step
            at += step

    def skip(self, nbytes: int) -> None:
        """Reads and discards `nbytes` bytes."""
        while nbytes:
            if self._start == self._end:
                self._fill()
            step = min(nbytes, self._end - self._start)
            self._start += step
            nbytes -= step

    def end_bulk(self) -> None:
        """Reads the end of a value."""
        if self.exactly(2) != b"\r\n":
            raise self._garbled("the server sent a value longer than it had announced")

    def done(self) -> None:
        """Checks that no byte is left, which would be read as the answer to the next command."""
        decrypted = 0 if self._plain else self._sock.pending()  # type: ignore[attr-defined]
        if self._start != self._end or self._reader.has_data() or decrypted:
            raise self._garbled("the server sent more than was asked for")

    def _feed(self) -> int:
        """Parses the bytes in the buffer; returns how many they were."""
        data = bytes(self._hold[self._start : self._end])
        recent = self._fed + data
        if _HUGE.search(recent):
            raise self._garbled("the server sent a list of millions of entries")
        self._fed = recent[-_HUGE_NBYTES:]
        self._reader.feed(data)
        self._start = self._end
        return len(data)

    def _fill(self) -> None:
        """Receives at least one byte after those in the buffer."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start:
            waiting = self._end - self._start
            self._hold[:waiting] = bytes(self._hold[self._start : self._end])
            self._start, self._end = 0, waiting
        self._end += self._receive(self._hold[self._end :], 0)

    def _receive(self, view: memoryview, flags: int) -> int:
        try:
            received = self._sock.recv_into(view, view.nbytes, flags)
        except BlockingIOError as error:
            raise self._too_slow() from error
        if not received:
            raise BackendUnavailable("the server closed the connection")
        self._received += received
        now = time.monotonic()
        if now - self._since > self._timeout:
            if self._received < _SLOWEST_NBYTES and received < view.nbytes:
                raise self._too_slow()
            self._since, self._received = now, 0
        return received

    def _send_encrypted(self, buffers: Sequence[Bytes]) -> None:
        small: list[bytes] = []  # one record for many small commands
        for data in buffers:
            if len(data) < _HOLD_NBYTES:
                small.append(bytes(data))
                continue
            self._sock.sendall(b"".join(small))
            self._sock.sendall(data)
            small.clear()
        self._sock.sendall(b"".join(small))

    def _too_slow(self) -> BackendUnavailable:
        return BackendUnavailable(
            f"no answer, or less than {_SLOWEST_NBYTES >> 10} KiB, for {self._timeout:g} s"
        )

    @staticmethod
    def _garbled(what: str) -> BackendUnavailable:
        return BackendUnavailable(f"the server's answer makes no sense: {what}")


def _is_local(sock: socket.socket) -> bool:
    """Returns whether the other end is on this host."""
    try:
        return bool(sock.getsockname()[0] == sock.getpeername()[0])
    except (OSError, IndexError):
        return False  # it is closed already, or has no address
