"""Bytes between a socket and registered memory.

Host memory is what the kernel copies from and to. That of a device goes through a small buffer of
host memory, one per connection.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvconnect.transfer.reads import Runs
from kvconnect.transfer.regions import Region

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Disconnected", "Stream", "prepare", "receive_exactly"]

_VECTORS = 1024  # IOV_MAX of Linux
_STAGING_NBYTES = 4 << 20


class Disconnected(OSError):
    """The other side closed the connection."""


def prepare(connection: socket.socket) -> None:
    """Sets what all connections have: no delay of small requests, and a partition found in 3 s."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)


def block_until(connection: socket.socket, option: int, seconds: float) -> None:
    """Makes the socket block, in the kernel and for `seconds` without progress (0: for ever)."""
    connection.settimeout(None)
    whole, fraction = divmod(seconds, 1)
    timeval = struct.pack("@ll", int(whole), int(fraction * 1_000_000))
    connection.setsockopt(socket.SOL_SOCKET, option, timeval)


def receive_exactly(connection: socket.socket, nbytes: int, deadline: float | None = None) -> bytes:
    """Returns the next `nbytes`; blocks, until `deadline` (of `time.monotonic`) if there is one.

    Raises:
        Disconnected: the connection ended before.
        TimeoutError: the deadline passed.
    """
    data = bytearray(nbytes)
    view = memoryview(data)
    while view:
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        received = connection.recv_into(view)
        if not received:
            raise Disconnected("the connection was closed")
        view = view[received:]
    return bytes(data)


class Stream:
    """A connection in blocking mode, and the buffer for what is not host memory.

    Not thread-safe, but another thread may shut the connection down.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._buffer: Tensor | None = None

    def send(self, region: Region, runs: Runs) -> None:
        """Sends the bytes of `runs`, as they are while they are sent.

        Raises:
            OSError: the connection broke or its timeout passed without progress; some, all or none
                was sent.
        """
        if not region.host:
            for part, offset in self._staged(runs):
                part.copy_(region.bytes[offset : offset + part.numel()])
                self._send_all([part.numpy().data])
            return
        view = region.view()
        for vectors in _vectors(view, runs):
            self._send_all(vectors)

    def receive(self, region: Region, runs: Runs) -> None:
        """Fills `runs` with what comes.

        Raises:
            OSError: the connection broke or was shut down; some, all or none of the bytes have
                changed, and none changes any more.
        """
        if not region.host:
            for part, offset in self._staged(runs):
                self._receive_all([part.numpy().data])
                region.bytes[offset : offset + part.numel()].copy_(part)
            return
        view = region.view()
        for vectors in _vectors(view, runs):
            self._receive_all(vectors)

    def _staged(self, runs: Runs) -> Iterator[tuple[Tensor, int]]:
        """Pieces of the buffer, and the offset of the bytes that go through each."""
        import torch  # seconds

        if self._buffer is None:
            pinned = torch.cuda.is_available()
            self._buffer = torch.empty(_STAGING_NBYTES, dtype=torch.uint8, pin_memory=pinned)
        for offset, nbytes in runs.tolist():
            for begin in range(0, nbytes, _STAGING_NBYTES):
                yield self._buffer[: min(nbytes - begin, _STAGING_NBYTES)], offset + begin

    def _send_all(self, vectors: list[memoryview]) -> None:
        while vectors:
            sent = (
                self.connection.send(vectors[0])
                if len(vectors) == 1
                else self.connection.sendmsg(vectors)
            )
            vectors = _left(vectors, sent)

    def _receive_all(self, vectors: list[memoryview]) -> None:
        while vectors:
            if len(vectors) == 1:
                received = self.connection.recv_into(vectors[0], 0, socket.MSG_WAITALL)
            else:
                received = self.connection.recvmsg_into(vectors, 0, socket.MSG_WAITALL)[0]
            if not received:
                raise Disconnected("the connection was closed")
            vectors = _left(vectors, received)


def _vectors(view: memoryview, runs: Runs) -> Iterator[list[memoryview]]:
    for begin in range(0, len(runs), _VECTORS):
        part = runs[begin : begin + _VECTORS]
        ends = part["offset"] + part["nbytes"]
        yield [
            view[offset:end]
            for offset, end in zip(part["offset"].tolist(), ends.tolist(), strict=True)
        ]


def _left(vectors: list[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of `vectors` after their first `nbytes`."""
    for index, vector in enumerate(vectors):
        if nbytes < len(vector):
            return [vector[nbytes:], *vectors[index + 1 :]]
        nbytes -= len(vector)
    return []
