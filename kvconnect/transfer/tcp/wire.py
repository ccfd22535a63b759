"""The requests and answers: which runs of a region, and whether their bytes follow.

Each part of a message is followed by its code (see `kvconnect.transfer.seal`): the head of a
request, its runs, an answer, and its digests of leading bytes if it has any. The codes of a request
make the `seed` of the checksums of the other bytes that answer it, and the code of the digests
covers the seed. So all checksums cover the nonces of both sides, the number of the request, its
region, its runs and the epoch of the lease.
"""

from __future__ import annotations

import hashlib
import socket
import struct
from dataclasses import dataclass

import numpy as np

from kvconnect.transfer.reads import RUN, Runs
from kvconnect.transfer.seal import CODE_NBYTES, Seal
from kvconnect.transfer.tcp.kept_digests import (
    MAX_CELL_NBYTES,
    MAX_CELLS,
    MIN_CELL_NBYTES,
    NO_DIGESTS,
    Leading,
)
from kvconnect.transfer.tcp.stream import receive_exactly

MAX_RUNS = 1 << 16
"""The most runs of one request. A source holds at most 1 MiB of runs for one connection."""

_MAX_NBYTES = 1 << 46
_MAGIC = 0x4B565453
_REQUEST = struct.Struct("<IIIQQ")  # magic, region, runs, bytes of them all, epoch; then the runs
_ANSWER = struct.Struct("<IIQII")  # magic, status, bytes that follow, of a cell, cells; digests
_SERVED, _OUTSIDE = range(2)


class Malformed(OSError):
    """The error that bytes are no message of this protocol, or not the next one unchanged.

    The connection cannot be used any more.
    """


@dataclass(frozen=True, slots=True)
class Request:
    """A request, as both sides know it.

    Attributes:
        region: the number of a region of the source.
        runs: the runs of that region to read.
        nbytes: the bytes of all runs.
        epoch: the epoch of the lease under which they are read.
        seed: the seed of the checksums of the bytes that answer the request.
    """

    region: int
    runs: Runs
    nbytes: int
    epoch: int
    seed: int


def send_request(
    connection: socket.socket, seal: Seal, region: int, runs: Runs, *, epoch: int
) -> Request:
    """Sends a request for up to `MAX_RUNS` runs under the lease `epoch`, and returns it."""
    total = int(runs["nbytes"].sum())
    head = _REQUEST.pack(_MAGIC, region, len(runs), total, epoch)
    body = runs.tobytes()
    codes = seal.code(head), seal.code(body)
    connection.sendall(b"".join((head, codes[0], body, codes[1])))
    return Request(region, runs, total, epoch, _seed(seal, codes))


def receive_request(connection: socket.socket, seal: Seal) -> Request:
    """Returns the next request. Its runs may be outside of the region.

    Raises:
        Malformed: a code, the magic, the count or the sum is wrong.
        Disconnected: the reader closed the connection.
    """
    head, first = _coded(connection, _REQUEST.size)
    if not seal.fits(first, head):
        raise Malformed("the head of a request has another code")
    magic, region, count, total, epoch = _REQUEST.unpack(head)
    if magic != _MAGIC or not 0 < count <= MAX_RUNS or total > _MAX_NBYTES:
        raise Malformed(f"a request with magic {magic:#x} for {total} bytes in {count} runs")
    body, second = _coded(connection, count * RUN.itemsize)
    if not seal.fits(second, body):
        raise Malformed("the runs of a request have another code")
    runs = np.frombuffer(body, RUN)
    nbytes = runs["nbytes"]  # each at most `total`: their sum does not overflow
    if int(nbytes.min()) < 1 or int(nbytes.max()) > total or int(nbytes.sum()) != total:
        raise Malformed(f"a request for {total} bytes whose runs have others")
    return Request(region, runs, total, epoch, _seed(seal, (first, second)))


def send_refusal(connection: socket.socket, seal: Seal) -> None:
    """Answers that the runs of a request are outside of the region."""
    answer = _ANSWER.pack(_MAGIC, _OUTSIDE, 0, 0, 0)
    connection.sendall(answer + seal.code(answer))


def send_answer(
    connection: socket.socket, seal: Seal, asked: Request, leading: Leading = NO_DIGESTS
) -> None:
    """Answers that the bytes of `asked` follow, with the digests of the `leading` ones."""
    answer = _ANSWER.pack(_MAGIC, _SERVED, asked.nbytes, leading.cell, len(leading.digests))
    answer += seal.code(answer)
    if leading.cell:
        digests = leading.digests.astype("<u8", copy=False).tobytes()
        answer += digests + seal.code(_seeded(asked, digests))
    connection.sendall(answer)


def receive_answer(connection: socket.socket, seal: Seal, asked: Request) -> Leading | None:
    """Receives the answer to `asked`; blocks.

    Returns:
        The digests of the leading bytes that follow; ``None`` if no bytes follow, because the
        runs are outside of the region.

    Raises:
        Malformed: the bytes are no answer, or another number of bytes would follow.
        Disconnected: the source closed the connection.
    """
    answer, code = _coded(connection, _ANSWER.size)
    if not seal.fits(code, answer):
        raise Malformed("an answer has another code")
    magic, status, nbytes, cell, count = _ANSWER.unpack(answer)
    if magic != _MAGIC or status not in {_SERVED, _OUTSIDE}:
        raise Malformed(f"an answer with magic {magic:#x} and status {status}")
    if nbytes != (asked.nbytes if status == _SERVED else 0):
        raise Malformed(f"an answer of {nbytes} bytes to a request for {asked.nbytes}")
    if status == _OUTSIDE or not count:
        return NO_DIGESTS if status == _SERVED else None
    if not MIN_CELL_NBYTES <= cell <= MAX_CELL_NBYTES or count > MAX_CELLS or cell * count > nbytes:
        raise Malformed(f"digests of {count} times {cell} bytes of {nbytes}")
    digests, code = _coded(connection, 8 * count)
    if not seal.fits(code, _seeded(asked, digests)):
        raise Malformed("the digests of an answer have another code")
    return Leading(cell, np.frombuffer(digests, "<u8"))


def _seeded(asked: Request, digests: bytes) -> bytes:
    return asked.seed.to_bytes(8, "big") + digests


def _coded(connection: socket.socket, nbytes: int) -> tuple[bytes, bytes]:
    """Returns the next `nbytes` and the code behind them."""
    data = receive_exactly(connection, nbytes + CODE_NBYTES)
    return data[:nbytes], data[nbytes:]


def _seed(seal: Seal, codes: tuple[bytes, bytes]) -> int:
    said = seal.derived(b"seed") + codes[0] + codes[1]
    return int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "big")
