"""Requests and answers: which runs of a region, and whether their bytes follow."""

from __future__ import annotations

import socket
import struct

import numpy as np

from kvconnect.transfer.reads import RUN, Runs
from kvconnect.transfer.tcp.stream import receive_exactly

__all__ = [
    "MAX_RUNS",
    "OUTSIDE",
    "SERVED",
    "Malformed",
    "receive_answer",
    "receive_request",
    "send_answer",
    "send_request",
]

MAX_RUNS = 1 << 16
"""Of one request: 1 MiB of runs is the most that a source holds for one connection."""

_MAX_NBYTES = 1 << 46
_MAGIC = 0x4B565452
_REQUEST = struct.Struct("<IIIQ")  # magic, region, runs, bytes of them all; then the runs
_ANSWER = struct.Struct("<IIQ")  # magic, status, bytes that follow
SERVED, OUTSIDE = range(2)


class Malformed(OSError):
    """What came is no message of this protocol: the connection is of no use any more."""


def send_request(connection: socket.socket, region: int, runs: Runs) -> int:
    """Asks for up to `MAX_RUNS` runs; returns how many bytes will follow."""
    total = int(runs["nbytes"].sum())
    head = _REQUEST.pack(_MAGIC, region, len(runs), total)
    connection.sendall(head + runs.tobytes())
    return total


def receive_request(connection: socket.socket) -> tuple[int, Runs]:
    """Returns the region and the runs that are asked for, which may be outside of it.

    Raises:
        Malformed: magic, count or sum are wrong.
        Disconnected: the reader closed the connection.
    """
    magic, region, count, total = _REQUEST.unpack(receive_exactly(connection, _REQUEST.size))
    if magic != _MAGIC or not 0 < count <= MAX_RUNS or total > _MAX_NBYTES:
        raise Malformed(f"a request with magic {magic:#x} for {total} bytes in {count} runs")
    runs = np.frombuffer(receive_exactly(connection, count * RUN.itemsize), RUN)
    nbytes = runs["nbytes"]  # each at most `total`: their sum does not overflow
    if int(nbytes.min()) < 1 or int(nbytes.max()) > total or int(nbytes.sum()) != total:
        raise Malformed(f"a request for {total} bytes whose runs have others")
    return region, runs


def send_answer(connection: socket.socket, status: int, nbytes: int) -> None:
    """Says whether `nbytes` follow."""
    connection.sendall(_ANSWER.pack(_MAGIC, status, nbytes))


def receive_answer(connection: socket.socket, expected: int) -> int:
    """Returns the status; with `SERVED` the `expected` bytes follow.

    Raises:
        Malformed: it is no answer, or another number of bytes would follow.
        Disconnected: the source closed the connection.
    """
    magic, status, nbytes = _ANSWER.unpack(receive_exactly(connection, _ANSWER.size))
    if magic != _MAGIC or status not in {SERVED, OUTSIDE}:
        raise Malformed(f"an answer with magic {magic:#x} and status {status}")
    if nbytes != (expected if status == SERVED else 0):
        raise Malformed(f"an answer of {nbytes} bytes to a request for {expected}")
    return int(status)
