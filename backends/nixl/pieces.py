"""The bytes to read from a peer for one load, in portions that fit the staging memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvconnect.transfer.control.keyed import GrantKeys
from kvconnect.transfer.reads import Reads

__all__ = ["Part", "Portion", "portions"]


@dataclass(frozen=True, slots=True)
class Part:
    """The contiguous bytes of one block.

    Attributes:
        block: the index of the block in the grant.
        start: the offset of the part in the block, in bytes.
        nbytes: the bytes of the part.
        pieces: the offset in the peer's region, and the bytes, of the part in each unit.
    """

    block: int
    start: int
    nbytes: int
    pieces: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Portion:
    """The parts that are read together."""

    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    def reads(self, granted: GrantKeys, local_region: int, local: Sequence[int]) -> list[Reads]:
        """Returns the reads; `local` has the offset of each part in the local region, in bytes.

        Pieces of one size form one `Reads`; blocks of equal length have one or two sizes.
        """
        by_size: dict[int, tuple[list[int], list[int]]] = {}
        for part, at in zip(self.parts, local, strict=True):
            done = at
            for offset, nbytes in part.pieces:
                far, near = by_size.setdefault(nbytes, ([], []))
                far.append(offset)
                near.append(done)
                done += nbytes
        return [
            Reads(
                granted.region,
                np.array(far, np.int64),
                local_region,
                np.array(near, np.int64),
                nbytes,
                granted.epoch,
            )
            for nbytes, (far, near) in by_size.items()
        ]


def portions(granted: GrantKeys, blocks: int, most: int) -> Iterator[Portion]:
    """Yields the first `blocks` blocks of `granted` in portions of at most `most` bytes."""
    parts: list[Part] = []
    room = most
    for part in _parts(granted, blocks, most):
        if part.nbytes > room:
            yield Portion(tuple(parts))
            parts, room = [], most
        parts.append(part)
        room -= part.nbytes
    if parts:
        yield Portion(tuple(parts))


def _parts(granted: GrantKeys, blocks: int, most: int) -> Iterator[Part]:
    """Yields the parts of the first `blocks` blocks; splits those larger than `most`."""
    unit, first = granted.unit, 0
    for block, size in enumerate(granted.sizes[:blocks]):
        units = granted.units[first : first + -(-size // unit)]
        first += len(units)
        for start in range(0, size, most):
            end = min(size, start + most)
            yield Part(block, start, end - start, tuple(_pieces(units, unit, start, end)))


def _pieces(units: Sequence[int], unit: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    at = start
    while at < end:
        index, within = divmod(at, unit)
        nbytes = min(unit - within, end - at)
        yield units[index] * unit + within, nbytes
        at += nbytes
