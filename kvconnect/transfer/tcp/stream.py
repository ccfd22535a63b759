"""The bytes between a socket and registered memory, each piece with a checksum.

Sent bytes pass through a small buffer of host memory, one per connection, unless their digests are
kept (see `kept_digests`). Received bytes are written to host memory at once, and to a device's
memory through such a buffer.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

import xxhash

from kvconnect.transfer.reads import Runs, pieces
from kvconnect.transfer.regions import Region
from kvconnect.transfer.seal import Seals
from kvconnect.transfer.tcp.kept_digests import Leading

if TYPE_CHECKING:
    from torch import Tensor

_VECTORS = 1024  # IOV_MAX of Linux
_SUM = struct.Struct("<Q")

PIECE_NBYTES = 256 << 10
"""Bytes under one checksum: few enough to stay in a core's second cache."""

_SENT_PIECES = 8
"""The pieces of one call that sends: each call may wake up the other side."""

_RECEIVED_PIECES = 2
"""The pieces of one call that receives: they are hashed afterwards, in a core's second cache."""

_DIGESTED_NBYTES = 512 << 10
"""The bytes of one call that receives bytes whose digests are known, hashed as above."""


class Disconnected(OSError):
    """The error that the other side closed the connection."""


class Corrupt(OSError):
    """The error that received bytes are not those that were sent.

    The connection cannot be used any more.
    """


def prepare(connection: socket.socket) -> None:
    """Sets `connection` to send small requests at once and to detect a partition within 3 s.

    If both ends have one address, the bytes stay on this machine, and there is no congestion to
    control. Then the kernel's plainest algorithm is used: BBR, for example, would spend processor
    time on pacing the bytes.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    if connection.getpeername()[0] == connection.getsockname()[0]:
        with suppress(OSError):  # not every sandbox lets it be chosen
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def block_until(connection: socket.socket, option: int, seconds: float) -> None:
    """Makes calls of `connection` block in the kernel for up to `seconds` without progress.

    Args:
        connection: the socket to change.
        option: ``SO_SNDTIMEO`` for sending, ``SO_RCVTIMEO`` for receiving.
        seconds: the limit; 0 for none.
    """
    connection.settimeout(None)
    whole, fraction = divmod(seconds, 1)
    timeval = struct.pack("@ll", int(whole), int(fraction * 1_000_000))
    connection.setsockopt(socket.SOL_SOCKET, option, timeval)


def receive_exactly(connection: socket.socket, nbytes: int, deadline: float | None = None) -> bytes:
    """Returns the next `nbytes`; blocks until `deadline` (of `time.monotonic`) or without limit.

    Raises:
        Disconnected: the connection ended before all bytes were received.
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
    """A connection in blocking mode, and the buffer that pieces go through.

    Leading bytes of a request whose digests are kept travel as they are. The other bytes travel in
    pieces of `PIECE_NBYTES`; behind each piece is its xxh3-64. Both sides hash a piece while it is
    in the processor's cache. A stream has a buffer of `_SENT_PIECES` pieces once it needs one.

    Not thread-safe, but another thread may shut the connection down.
    """

    def __init__(self, connection: socket.socket, seals: Seals) -> None:
        self.connection = connection
        self.seals = seals
        self._buffer: Tensor | None = None
        self._sums = memoryview(bytearray(_SUM.size * _RECEIVED_PIECES))

    def send(self, region: Region, runs: Runs, seed: int) -> None:
        """Sends the bytes of `runs` in `region`, as they are when their piece is copied; blocks.

        Their owner may write to them at any time. So each piece is copied, and the copy is hashed
        and sent.

        Raises:
            OSError: the connection broke or its timeout passed without progress; some, all or none
                of the bytes were sent.
        """
        buffer = self._staging()
        staged = buffer.numpy().data
        view = region.view() if region.host else None
        for batch in _batches(runs, _SENT_PIECES):
            end = 0
            for number, piece in batch:
                first = end
                for offset, nbytes in piece.tolist():
                    begin, end = end, end + nbytes
                    if view is not None:
                        staged[begin:end] = view[offset : offset + nbytes]
                    else:
                        buffer[begin:end].copy_(region.bytes[offset : offset + nbytes])
                _SUM.pack_into(staged, end, _checksum([staged[first:end]], seed, number))
                end += _SUM.size
            self.connection.sendall(staged[:end])

    def send_digested(self, region: Region, runs: Runs) -> None:
        """Sends the bytes of `runs` in host memory, whose digests the reader has; blocks.

        There is no copy: what is written to the memory meanwhile may be sent, and is refused.
        Afterwards the memory is not read any more.

        Raises:
            OSError: as `send`.
        """
        vectors = _views(region.view(), runs)
        for first in range(0, len(vectors), _VECTORS):
            some = vectors[first : first + _VECTORS]
            while some:
                some = _left(some, self.connection.sendmsg(some))

    def receive_digested(self, region: Region, runs: Runs, leading: Leading) -> None:
        """Receives the bytes under the digests of `leading`, and writes them to `runs`; blocks.

        Raises:
            Corrupt: bytes arrived that have other digests.
            OSError: the connection broke or was shut down.

        After either, some, all or none of the bytes have changed, and none changes any more.
        """
        view = region.view() if region.host else None
        size = max(1, _DIGESTED_NBYTES // leading.cell) * leading.cell
        digests, done = leading.digests.tolist(), 0
        for piece in pieces(runs, size):
            parts = [self._staged(0, piece)] if view is None else _views(view, piece)
            self._receive_all(list(parts))
            found = _digests(parts, leading.cell)
            if found != digests[done : done + len(found)]:
                raise Corrupt("bytes arrived that are not those that were published")
            done += len(found)
            if view is None:
                _scatter(self._staging(), region, piece)

    def receive(self, region: Region, runs: Runs, seed: int) -> None:
        """Receives bytes and writes them to `runs` of `region`; blocks.

        Raises:
            Corrupt: the received bytes are not those that were sent.
            OSError: the connection broke or was shut down.

        After either, some, all or none of the bytes have changed, and none changes any more.
        """
        view = region.view() if region.host else None
        for batch in _batches(runs, _RECEIVED_PIECES):
            vectors, landed = [], []
            for at, (number, piece) in enumerate(batch):
                parts = [self._staged(at, piece)] if view is None else _views(view, piece)
                checksum = self._sums[at * _SUM.size : (at + 1) * _SUM.size]
                vectors += [*parts, checksum]
                landed.append((number, parts, checksum))
            self._receive_all(vectors)
            for number, parts, checksum in landed:
                if _SUM.unpack(checksum) != (_checksum(parts, seed, number),):
                    raise Corrupt("bytes arrived that are not those that were sent")
            if view is None:
                for at, (_, piece) in enumerate(batch):
                    _scatter(self._staging()[at * PIECE_NBYTES :], region, piece)

    def _staged(self, at: int, piece: Runs) -> memoryview:
        """Returns the part of the buffer that receives `piece`, number `at` of its batch."""
        begin = at * PIECE_NBYTES
        return self._staging().numpy().data[begin : begin + int(piece["nbytes"].sum())]

    def _staging(self) -> Tensor:
        import torch  # seconds

        if self._buffer is None:
            pinned = torch.cuda.is_available()
            size = (PIECE_NBYTES + _SUM.size) * _SENT_PIECES
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return self._buffer

    def _receive_all(self, vectors: list[memoryview]) -> None:
        while vectors:
            first = vectors[:_VECTORS]
            received = self.connection.recvmsg_into(first, 0, socket.MSG_WAITALL)[0]
            if not received:
                raise Disconnected("the connection was closed")
            vectors = _left(vectors, received)


def _batches(runs: Runs, most: int) -> Iterator[list[tuple[int, Runs]]]:
    """Yields pieces with their numbers, up to `most` at a time."""
    numbered = enumerate(pieces(runs, PIECE_NBYTES))
    while batch := list(islice(numbered, most)):
        yield batch


def _checksum(parts: list[memoryview], seed: int, number: int) -> int:
    """Returns the xxh3-64 of `parts`, which make the piece `number`, with its own seed."""
    seed = (seed + number) % (1 << 64)
    if len(parts) == 1:
        return xxhash.xxh3_64_intdigest(parts[0], seed)
    state = xxhash.xxh3_64(seed=seed)
    for part in parts:
        state.update(part)
    return state.intdigest()


def _views(view: memoryview, piece: Runs) -> list[memoryview]:
    return [view[offset : offset + nbytes] for offset, nbytes in piece.tolist()]


def _digests(parts: list[memoryview], size: int) -> list[int]:
    """Returns the xxh3-64 of each `size` bytes of `parts`, which have a multiple of that."""
    if all(len(part) % size == 0 for part in parts):
        return [
            xxhash.xxh3_64_intdigest(part[begin : begin + size])
            for part in parts
            for begin in range(0, len(part), size)
        ]
    found, state, room = [], xxhash.xxh3_64(), size
    for part in parts:
        begin = 0
        while begin < len(part):
            some = part[begin : begin + room]
            state.update(some)
            begin, room = begin + len(some), room - len(some)
            if not room:
                found.append(state.intdigest())
                state, room = xxhash.xxh3_64(), size
    return found


def _scatter(buffer: Tensor, region: Region, piece: Runs) -> None:
    end = 0
    for offset, nbytes in piece.tolist():
        begin, end = end, end + nbytes
        region.bytes[offset : offset + nbytes].copy_(buffer[begin:end])


def _left(vectors: list[memoryview], nbytes: int) -> list[memoryview]:
    """Returns `vectors` without their first `nbytes`."""
    for index, vector in enumerate(vectors):
        if nbytes < len(vector):
            return [vector[nbytes:], *vectors[index + 1 :]]
        nbytes -= len(vector)
    return []
