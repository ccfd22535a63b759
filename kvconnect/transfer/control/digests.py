"""The messages by which D compares the bytes that it read with P's memory."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from kvconnect.transfer.control.fields import Count, Number32, packed, unpacked
from kvconnect.transfer.control.messages import Message

MAX_PIECES = 1 << 16
"""The most pieces under one digest."""


class FindDigest(Message):
    """Requests the digest of pieces of P's memory that D has read under a lease. Sent by D.

    Attributes:
        seq: the answer repeats it.
        region: number of the memory at P's transport.
        nbytes: the size of each piece.
        offsets: the offsets of the pieces in the memory, in bytes.
    """

    code: ClassVar[int] = 21

    seq: Count
    region: Number32
    nbytes: Annotated[int, Field(ge=1, lt=1 << 48)]
    offsets: Annotated[
        tuple[Count, ...],
        Field(min_length=1, max_length=MAX_PIECES),
        unpacked("uint64"),
        packed("uint64"),
    ]


class FoundDigest(Message):
    """Answers a `FindDigest` with the xxh3-64 of the pieces; ``None`` if P computes no digest."""

    code: ClassVar[int] = 22

    seq: Count
    digest: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None
