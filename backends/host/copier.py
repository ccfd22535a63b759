"""The copies between a store's region and its callers' buffers, beside the event loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvconnect.backends.host.fused_copy import Bytes, FusedCopy, ValueCopy, fused_copy
from kvconnect.backends.lanes import Lane
from kvconnect.frame import HEADER_NBYTES, FrameChecksum

# Copying less than this takes less time than handing it to a thread.
_INLINE_NBYTES = 1 << 20
# The bytes hashed while they are in the processor's cache; with fewer the interpreter's lock is
# taken too often.
_PIECE_NBYTES = 2 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """A copy of one value.

    Attributes:
        parts: pairs of source and target, equally long, one after the other in the value.
        checksum: hashes the bytes that are copied.
        seals: true if `checksum` seals the source once it is read.
    """

    parts: Sequence[tuple[Bytes, Bytes]]
    checksum: FrameChecksum | None = None
    seals: bool = False

    @property
    def nbytes(self) -> int:
        """The bytes of the value."""
        return sum(source.nbytes for source, _ in self.parts)

    def run(self) -> None:
        """Copies on this thread; large pieces without the interpreter's lock."""
        if self.checksum is None:
            for source, target in self.parts:
                _copy(source, target)
            return
        done = 0
        for source, target in self.parts:
            for at in range(0, source.nbytes, _PIECE_NBYTES):
                piece = slice(at, at + _PIECE_NBYTES)
                _copy(source[piece], target[piece])
                self.checksum.passed(done, done + source[piece].nbytes)
                done += source[piece].nbytes
        self._seal()

    @property
    def fusable(self) -> ValueCopy | None:
        """The argument for `FusedCopy`; ``None`` for a value with gaps or an incomplete frame."""
        gaps = not all(one.flags.c_contiguous for part in self.parts for one in part)
        if gaps or not self.parts:
            return None
        if self.checksum is None:
            return ValueCopy(self.parts, 0)
        end = self.checksum.end_of(self.parts[0][0].data)
        return None if end is None or end > self.nbytes else ValueCopy(self.parts, end)

    def ran(self, end: int, digest: bytes) -> None:
        """Records the result of `FusedCopy` for `fusable`."""
        if self.checksum is not None:
            self.checksum.hashed(end, digest)
            self._seal()

    def _seal(self) -> None:
        if self.seals and self.checksum is not None:
            self.checksum.seal()
            source, target = self.parts[0]
            _copy(source[:HEADER_NBYTES], target[:HEADER_NBYTES])

    def cut(self, nbytes: int) -> tuple[Copy, Copy]:
        """Splits off the first `nbytes`; only for a copy without checksum."""
        first: list[tuple[Bytes, Bytes]] = []
        left = nbytes
        for number, (source, target) in enumerate(self.parts):
            if source.nbytes > left:
                rest = [(source[left:], target[left:]), *self.parts[number + 1 :]]
                return Copy([*first, (source[:left], target[:left])]), Copy(rest)
            first.append((source, target))
            left -= source.nbytes
        return Copy(first), Copy([])


async def copy_all(copies: Sequence[Copy], lane: Lane) -> None:
    """Runs all of `copies` on `lane`, each call in two halves for its two threads.

    One thread alone does not use all the memory bandwidth. Queued work keeps both busy while
    a call's end reaches the event loop, and the next call comes from there.

    Raises:
        BackendUnavailable: the lane was closed; not all was copied.
    """
    nbytes = sum(one.nbytes for one in copies)
    if nbytes <= _INLINE_NBYTES:
        _run(copies, None)
        return
    fused = fused_copy()
    halves = _halves(copies, nbytes // 2)
    for result in await lane.run_all([partial(_run, half, fused) for half in halves]):
        if result is not None:
            raise result


def _halves(copies: Sequence[Copy], left: int) -> tuple[Sequence[Copy], Sequence[Copy]]:
    """Splits `copies` in two, the first of about `left` bytes; a checksum is not divided."""
    for number, one in enumerate(copies):
        if one.nbytes <= left:
            left -= one.nbytes
        elif one.checksum is None:
            first, rest = one.cut(left)
            return [*copies[:number], first], [rest, *copies[number + 1 :]]
        else:
            middle = number + (one.nbytes <= 2 * left)
            return copies[:middle], copies[middle:]
    return copies, []


def _run(copies: Sequence[Copy], fused: FusedCopy | None) -> None:
    for one in copies if fused is None else _fuse(copies, fused):
        one.run()


def _fuse(copies: Sequence[Copy], fused: FusedCopy) -> list[Copy]:
    """Runs those of `copies` that `fused` can do; returns the others."""
    values = [(one, one.fusable) for one in copies]
    fusable = [(one, value) for one, value in values if value is not None]
    digests = fused.run([value for _, value in fusable])
    for (one, value), digest in zip(fusable, digests, strict=True):
        one.ran(value.end, digest)
    return [one for one, value in values if value is None]


def _copy(source: Bytes, target: Bytes) -> None:
    # memcpy on this thread, without the interpreter's lock. torch would divide the copy among its
    # threads, which is slower, and far slower if the cores are busy.
    np.copyto(target, source)
