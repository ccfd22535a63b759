"""The faults of a network, as a `TcpProxy` shows them to a client."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

Rewrite: TypeAlias = Callable[[int, bytes], bytes]
"""Gets how many bytes of answers this connection carried before, and the next ones; returns what
the client is to see instead."""


@dataclass(frozen=True, slots=True)
class TcpFault:
    """A fault of the network; by default none.

    Attributes:
        refused: connections are refused, and open ones are reset.
        black_hole: new connections are never answered (their SYN is dropped), and open ones forward
            no byte.
        frozen: new connections are accepted and no byte is forwarded, as with a stopped server.
            Bytes sent meanwhile arrive once the fault is over.
        half_open: the server has lost every connection without a sign: the client's stays open and
            silent. It is reset when the fault is over, as a restarted server would do.
        reset_after: the bytes of answers, since the fault was set, after which a connection is
            reset.
        bytes_per_s: the speed of answers.
        delay_s: the seconds by which answers are late.
        rewrite: changes answers, see `garbage`, `shorter`, `longer`.
    """

    refused: bool = False
    black_hole: bool = False
    frozen: bool = False
    half_open: bool = False
    reset_after: int | None = None
    bytes_per_s: float | None = None
    delay_s: float = 0.0
    rewrite: Rewrite | None = None

    @property
    def stopped(self) -> bool:
        """Returns whether no byte is forwarded."""
        return self.black_hole or self.frozen or self.half_open


def garbage(seed: int = 0) -> Rewrite:
    """Replaces answers by as many random bytes."""
    source = random.Random(seed)

    def replace(at: int, data: bytes) -> bytes:
        return source.randbytes(len(data))

    return replace


def shorter(after: int, nbytes: int) -> Rewrite:
    """Removes `nbytes` from each connection's answers, after the first `after` bytes."""

    def cut(at: int, data: bytes) -> bytes:
        start = max(0, min(len(data), after - at))
        end = max(0, min(len(data), after + nbytes - at))
        return data[:start] + data[end:]

    return cut


def longer(after: int, nbytes: int) -> Rewrite:
    """Inserts `nbytes` zeros into each connection's answers, after the first `after` bytes."""

    def grow(at: int, data: bytes) -> bytes:
        if not at <= after < at + len(data):
            return data
        return data[: after - at] + bytes(nbytes) + data[after - at :]

    return grow
