"""Slots of the disk store, and what of them is moved in one system call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvconnect.backends.disk.direct_io import is_aligned
from kvconnect.frame import FrameChecksum

__all__ = ["Location", "Run", "parts"]

# A thread moves about so much at a time; neighbouring slots go in one system call up to this. Less
# costs more hand-overs; with more, too little of a call's I/O is under way at once.
_PART_NBYTES = 8 << 20


@dataclass(frozen=True, slots=True, order=True)
class Location:
    """Where a slot of `size` bytes is."""

    segment: int
    slot: int
    size: int

    @property
    def key(self) -> tuple[int, int]:
        """Which slot it is, for the index."""
        return self.segment, self.slot

    @property
    def offset(self) -> int:
        """Where it starts in the segment's file."""
        return self.slot * self.size


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes that are moved in one system call: neighbours in the file of `location`.

    `buffers` are aligned, or there is only one. `checksums` seal the frames that begin in them,
    which the thread that writes them does.
    """

    location: Location
    offset: int
    buffers: Sequence[Tensor]
    checksums: Sequence[FrameChecksum] = ()


def parts(
    locations: Sequence[Location],
    buffers: Sequence[Tensor],
    checksums: Sequence[FrameChecksum] = (),
) -> Iterator[list[Run]]:
    """All runs in order, about `_PART_NBYTES` at a time; of each buffer one checksum, or none."""
    part: list[Run] = []
    nbytes = 0
    for run in _runs(locations, buffers, checksums):
        part.append(run)
        nbytes += sum(buffer.numel() for buffer in run.buffers)
        if nbytes >= _PART_NBYTES:
            yield part
            part, nbytes = [], 0
    if part:
        yield part


def _runs(
    locations: Sequence[Location], buffers: Sequence[Tensor], checksums: Sequence[FrameChecksum]
) -> Iterator[Run]:
    """What can be moved in one call, at most `_PART_NBYTES`; never an empty buffer."""
    start = 0
    while start < len(locations):
        location, buffer = locations[start], buffers[start]
        nbytes = buffer.numel()
        stop = start + 1
        if is_aligned(buffer):
            while (
                stop < len(locations)
                and nbytes < _PART_NBYTES
                and _joined(locations, buffers, stop)
            ):
                nbytes += buffers[stop].numel()
                stop += 1
        if nbytes <= _PART_NBYTES or stop - start > 1 or not is_aligned(buffer):
            if nbytes:
                yield Run(location, location.offset, buffers[start:stop], checksums[start:stop])
        else:
            for at in range(0, nbytes, _PART_NBYTES):
                begun = checksums[start:stop] if at == 0 else ()
                yield Run(location, location.offset + at, [buffer[at : at + _PART_NBYTES]], begun)
        start = stop


def _joined(locations: Sequence[Location], buffers: Sequence[Tensor], at: int) -> bool:
    """Whether slot `at` is read or written with the one before it."""
    before, location = locations[at - 1], locations[at]
    return (
        (location.segment, location.slot) == (before.segment, before.slot + 1)
        and buffers[at - 1].numel() == before.size
        and buffers[at].numel() == location.size
        and is_aligned(buffers[at])
    )
