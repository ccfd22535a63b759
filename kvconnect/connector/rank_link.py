"""The messages of an engine's exchanges with one other rank, over gloo."""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["MOST_NBYTES", "Message", "RankLink"]

FOREVER = timedelta(days=365)
"""For gloo's waits, in which only threads wait that no caller waits for."""

MOST_NBYTES = 1 << 30
"""The largest payload of a message: 1 GiB."""

_TAG = 0
_REST_TAG = 2
_MAGIC = 0x6B76_6363
_HEAD = struct.Struct("<IBBHqq")  # magic, kind, status, -, number of the exchange, bytes
_FRAME_NBYTES = 4096  # sent whole: a payload that fits takes one message of gloo
_INLINE_NBYTES = _FRAME_NBYTES - _HEAD.size
_POSTED = 2  # the leader goes from its broadcast to the next exchange at once


@dataclass(frozen=True, slots=True)
class Message:
    """One rank's part of one exchange.

    Attributes:
        kind: of the exchange; 0: no rank of this engine sent this.
        status: what the payload is.
        number: of the exchange.
        payload: up to `MOST_NBYTES`.
    """

    kind: int
    status: int
    number: int
    payload: bytes

    def frames(self) -> list[tuple[Tensor, int]]:
        """Returns what gloo sends, each with its tag: a frame, and what did not fit into it."""
        head = _HEAD.pack(_MAGIC, self.kind, self.status, 0, self.number, len(self.payload))
        inline = head + self.payload[:_INLINE_NBYTES]
        frame = torch.zeros(_FRAME_NBYTES, dtype=torch.uint8)
        frame.numpy()[: len(inline)] = np.frombuffer(inline, np.uint8)
        if len(self.payload) <= _INLINE_NBYTES:
            return [(frame, _TAG)]
        rest = torch.frombuffer(bytearray(self.payload[_INLINE_NBYTES:]), dtype=torch.uint8)
        return [(frame, _TAG), (rest, _REST_TAG)]


_Posted: TypeAlias = tuple[dist.Work, Tensor]
_Sent: TypeAlias = list[_Posted]


class RankLink:
    """Sends messages to one other rank and receives its messages, in order.

    gloo's waits cannot be interrupted, and one for a rank whose connection breaks at the wrong
    moment never ends. Only the two threads of this link wait in gloo. The engine's thread waits for
    these threads: each of its waits ends with a timeout, or with `end`.

    Args:
        group: of gloo.
        peer: the other rank's number in `group`.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self._group: dist.ProcessGroup | None = group
        self._peer = peer
        self._over = False
        self._unsent: deque[tuple[int, _Sent]] = deque()
        self._waiting = 0
        self._posted: SimpleQueue[_Posted | None] = SimpleQueue()
        self._received: SimpleQueue[Message | str | None] = SimpleQueue()
        self._sending: SimpleQueue[_Sent | None] = SimpleQueue()
        self._sent: SimpleQueue[str | None] = SimpleQueue()
        for _ in range(_POSTED):
            self._post()
        self._threads = [
            threading.Thread(target=target, name=f"kvconnect-rank-{name}-{peer}", daemon=True)
            for target, name in [(self._receive_all, "receive"), (self._send_all, "send")]
        ]
        for thread in self._threads:
            thread.start()

    def send(self, message: Message) -> None:
        """Begins to send `message`; does not wait for the other rank.

        Raises:
            ConnectionError: the connection is broken, or `end` was called.
        """
        group = self._open_group()
        self._unsent.append((message.number, []))
        for buffer, tag in message.frames():
            try:
                self._unsent[-1][1].append((group.send([buffer], self._peer, tag), buffer))
            except RuntimeError as error:
                raise ConnectionError(str(error)) from error
            finally:
                del buffer

    def wait_until_sent(self, timeout_s: float, *, but: int = 0) -> None:
        """Blocks until the other rank has taken all messages `but` the last ones.

        A message from the other rank shows by its number that the earlier ones were taken.

        Raises:
            TimeoutError: the other rank did not take them within `timeout_s` seconds.
            ConnectionError: the connection is broken, or `end` was called.
        """
        until = time.monotonic() + timeout_s
        while len(self._unsent) + self._waiting > but:
            if self._over:
                raise ConnectionError("the connection was ended")
            if not self._waiting:
                self._sending.put(self._unsent.popleft()[1])
                self._waiting += 1
            try:
                error = self._sent.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                raise TimeoutError from None
            if error is not None:
                raise ConnectionError(error)
            self._waiting -= 1

    def receive(self, timeout_s: float | None) -> Message:
        """Returns the next message, for which this blocks up to `timeout_s`, or without limit.

        Raises:
            TimeoutError: no whole message came within `timeout_s` seconds.
            ConnectionError: the connection is broken, or `end` was called.
        """
        if self._over:
            raise ConnectionError("the connection was ended")
        try:
            received = self._received.get(timeout=timeout_s)
        except Empty:
            raise TimeoutError from None
        if received is None:
            raise ConnectionError("the connection was ended")
        if isinstance(received, str):
            raise ConnectionError(received)
        while self._unsent and self._unsent[0][0] < received.number:
            self._unsent.popleft()
        self._post()  # only now: what the other rank may send ahead is bounded by what is posted
        return received

    def end(self) -> None:
        """Ends every wait of `receive` and `wait_until_sent`; on any thread. Idempotent."""
        self._over = True
        self._received.put(None)
        self._sent.put("the connection was ended")
        self._posted.put(None)
        self._sending.put(None)

    def close(self, until: float) -> None:
        """Ends the link and its threads; the group must have ended.

        Blocks until `until` of the monotonic clock at most. A thread that gloo still has then is
        left behind, and keeps the group's connections.
        """
        self.end()
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        # An error that is kept keeps its frames, and so this link: its descriptors go all the same.
        self._group = None
        self._unsent.clear()
        self._posted, self._sending = SimpleQueue(), SimpleQueue()

    # ------------------------------------------------------------------ inside

    def _open_group(self) -> dist.ProcessGroup:
        if self._over or self._group is None:
            raise ConnectionError("the connection was ended")
        return self._group

    def _post(self) -> None:
        """Begins to receive a frame; a broken connection is an error of a later `receive`."""
        buffer = torch.empty(_FRAME_NBYTES, dtype=torch.uint8)
        try:
            self._posted.put((self._open_group().recv([buffer], self._peer, _TAG), buffer))
        except RuntimeError as error:
            self._received.put(str(error))

    def _receive_all(self) -> None:
        try:
            while (posted := self._posted.get()) is not None:
                work, buffer = posted
                work.wait(FOREVER)
                self._received.put(self._whole(buffer.numpy().tobytes()))
        except RuntimeError as error:
            self._received.put(str(error))
        except ConnectionError:
            pass

    def _whole(self, data: bytes) -> Message:
        """Returns the message that begins with the frame `data`; waits for the rest of it."""
        magic, kind, status, _, number, length = _HEAD.unpack_from(data)
        if magic != _MAGIC or not 0 <= length <= MOST_NBYTES:
            return Message(0, status, number, b"")
        payload = data[_HEAD.size : _HEAD.size + min(length, _INLINE_NBYTES)]
        if length > _INLINE_NBYTES:
            rest = torch.empty(length - _INLINE_NBYTES, dtype=torch.uint8)
            self._open_group().recv([rest], self._peer, _REST_TAG).wait(FOREVER)
            payload += rest.numpy().tobytes()
        return Message(kind, status, number, payload)

    def _send_all(self) -> None:
        while (works := self._sending.get()) is not None:
            try:
                for work, _ in works:
                    work.wait(FOREVER)
            except RuntimeError as error:
                self._sent.put(str(error))
                return
            self._sent.put(None)
