"""The messages of an engine's exchanges with one other rank, over a connection of their own."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

MOST_NBYTES = 1 << 30
"""The largest payload of a message: 1 GiB."""

_MAGIC = 0x6B76_6363
_HEAD = struct.Struct("<IBBHqq")  # magic, kind, status, -, number of the exchange, bytes
_READ_NBYTES = 1 << 16  # bytes read at once, and at most read ahead
_LONG_S = 3600.0  # a wait without limit is a series of these


@dataclass(frozen=True, slots=True)
class Message:
    """A rank's part of one exchange.

    Attributes:
        kind: the kind of the exchange; 0: no rank of this engine sent this.
        status: the kind of the payload.
        number: the number of the exchange.
        payload: up to `MOST_NBYTES` bytes.
    """

    kind: int
    status: int
    number: int
    payload: bytes | bytearray

    def head(self) -> bytes:
        """Returns the bytes before the payload on the connection."""
        return _HEAD.pack(_MAGIC, self.kind, self.status, 0, self.number, len(self.payload))


class RankLink:
    """Sends messages to one other rank and receives its messages, in order.

    A message goes to the system on the caller's thread. If the connection cannot take all of it at
    once, a thread sends the rest and then ends. So two ranks may send each other any amount before
    they receive. Each wait ends with its timeout, with the connection, or with `end`.

    Args:
        connection: a stream to the other rank; the link closes it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._receiving = connection
        self._sending = connection.dup()  # a socket object has one timeout
        self._sending.settimeout(0.0)
        self._buffer = memoryview(bytearray(_READ_NBYTES))
        self._ahead = bytearray()
        self._is_amid = False
        self._over = False
        self._changed = threading.Condition()
        self._unsent: deque[list[memoryview]] = deque()
        self._error: str | None = None
        self._thread: threading.Thread | None = None

    def send(self, message: Message) -> None:
        """Starts sending `message`; does not wait for the other rank.

        Raises:
            ConnectionError: the connection is broken, or `end` was called.
        """
        parts = [memoryview(message.head()), memoryview(message.payload)]
        with self._changed:
            self._check()
            if not self._unsent:
                try:
                    parts = _rest(parts, self._sending.sendmsg(parts))
                except BlockingIOError:
                    pass
                except OSError as error:
                    raise ConnectionError(str(error)) from error
            if not parts:
                return
            self._unsent.append(parts)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._send_rest, name="kvconnect-rank-send", daemon=True
                )
                self._thread.start()

    def wait_until_sent(self, timeout_s: float, *, but: int = 0) -> None:
        """Blocks until the system has accepted all messages except the last `but`.

        Raises:
            TimeoutError: the other rank did not read enough within `timeout_s` seconds.
            ConnectionError: the connection is broken, or `end` was called.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._unsent) <= but or self._error, max(0.0, timeout_s)
            )
            self._check()
            if len(self._unsent) > but:
                raise TimeoutError

    def receive(self, timeout_s: float | None) -> Message:
        """Returns the next message; blocks for up to `timeout_s`, or without limit.

        Raises:
            TimeoutError: no whole message came within `timeout_s` seconds.
            ConnectionError: the connection is broken, `end` was called, or an earlier call ended
                amid a message.
        """
        self._check()
        if self._is_amid:
            raise ConnectionError("a message of it was not received whole")
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while len(self._ahead) < _HEAD.size:
            self._ahead += self._buffer[: self._read(self._buffer, until)]
        magic, kind, status, _, number, length = _HEAD.unpack_from(self._ahead)
        if magic != _MAGIC or not 0 <= length <= MOST_NBYTES:
            return Message(0, status, number, b"")
        del self._ahead[: _HEAD.size]
        if length <= len(self._ahead):
            payload = self._ahead[:length]
            del self._ahead[:length]
            return Message(kind, status, number, payload)
        payload, known = bytearray(length), len(self._ahead)
        payload[:known] = self._ahead
        self._ahead.clear()
        view = memoryview(payload)
        self._is_amid = True
        while known < length:
            known += self._read(view[known:], until)
        self._is_amid = False
        return Message(kind, status, number, payload)

    def end(self) -> None:
        """Ends every wait of `receive` and `wait_until_sent`; on any thread. Idempotent."""
        self._over = True
        with suppress(OSError):  # closed already, by either side
            self._receiving.shutdown(socket.SHUT_RDWR)  # wakes the sending and the receiving thread

    def close(self) -> None:
        """Ends the link and closes its connection. Idempotent."""
        self.end()
        if (thread := self._thread) is not None:
            thread.join()  # the connection is shut down: it does not wait
        self._receiving.close()
        self._sending.close()
        # An error that is kept keeps its frames, and so this link, but no messages.
        self._unsent.clear()
        self._ahead.clear()

    # ------------------------------------------------------------------ inside

    def _check(self) -> None:
        if self._over:
            raise ConnectionError("the connection was ended")
        if self._error is not None:
            raise ConnectionError(self._error)

    def _read(self, into: memoryview, until: float | None) -> int:
        """Reads some bytes, one at least; returns how many."""
        while True:
            left = _LONG_S if until is None else until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            try:
                self._receiving.settimeout(min(left, _LONG_S))
                nbytes = self._receiving.recv_into(into)
            except TimeoutError:
                continue
            except OSError as error:
                raise ConnectionError(str(error)) from error
            if self._over:
                raise ConnectionError("the connection was ended")
            if not nbytes:
                raise ConnectionError("it closed the connection")
            return nbytes

    def _send_rest(self) -> None:
        ready = select.poll()
        ready.register(self._sending, select.POLLOUT)
        while True:
            ready.poll()  # also ends when the connection does
            with self._changed:
                try:
                    parts = _rest(self._unsent[0], self._sending.sendmsg(self._unsent[0]))
                except BlockingIOError:
                    continue
                except OSError as error:
                    self._error = str(error)
                    self._changed.notify_all()
                    return
                if parts:
                    self._unsent[0] = parts
                    continue
                self._unsent.popleft()
                self._changed.notify_all()
                if not self._unsent:
                    self._thread = None
                    return


def _rest(parts: list[memoryview], sent: int) -> list[memoryview]:
    """Returns the rest of `parts` after the first `sent` bytes."""
    left = []
    for part in parts:
        if sent < len(part):
            left.append(part[sent:])
        sent = max(0, sent - len(part))
    return left
