"""The blocks that a sequence or a pin holds in one pool."""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvconnect.cache.pool.block_pool import BlockPool
from kvconnect.cache.tree.retention import DEFAULT_RETENTION, Retention
from kvconnect.cache.tree.segment import BlockIds, Segment, Span, new_ids

NOT_HELD = -1
"""The id of a block that was released, or is not reserved yet."""

_NO_BLOCK = array("i", [NOT_HELD])


def as_id_array(ids: BlockIds) -> npt.NDArray[np.int32]:
    """Returns a copy of `ids` as an int32 array that the caller owns."""
    return np.array(ids, np.int32)


def no_ids(count: int) -> BlockIds:
    """Returns an array of `count` times `NOT_HELD`."""
    return _NO_BLOCK * count


@dataclass(slots=True, eq=False)
class HeldPath:
    """The references to parts of one path in one pool.

    Attributes:
        pool: the pool.
        segment: the deepest referenced segment; ``None`` if there is none.
        spans: the referenced blocks of the path down to `segment`, in order and not adjacent. Spans
            begin and end where segments do.
    """

    pool: BlockPool
    segment: Segment | None = None
    spans: list[Span] = field(default_factory=list)

    def add(self, segment: Segment, start: int, stop: int) -> None:
        """Records the blocks ``start..stop`` as referenced; `segment` has the last of them.

        `claim` adds the holder to the segments.
        """
        if self.segment is None or self.segment.end < segment.end:
            self.segment = segment
        spans = self.spans
        if not spans or spans[-1][1] < start:
            spans.append((start, stop))
        elif spans[-1][1] == start:
            spans[-1] = (spans[-1][0], stop)
        else:
            insort(spans, (start, stop))

    def segments(self) -> Iterator[Segment]:
        """Yields the referenced segments, the deepest first."""
        step = self.segment
        for first, stop in reversed(self.spans):
            while step is not None and step.end > first:
                if step.start < stop:
                    yield step
                step = step.parent

    def ids_held(self) -> Iterator[BlockIds]:
        """Yields the ids of the held primary blocks in parts; some may be `NOT_HELD`."""
        for segment in self.segments():
            ids = segment.pools[self.pool.group].ids
            if ids is not None:
                yield ids

    def claim(self) -> None:
        """Adds one holder to each referenced segment, so that none is reclaimed."""
        published = self.pool.published
        for segment in self.segments():
            published.reference(segment)

    def let_go(self) -> None:
        """Removes one holder from each referenced segment, last block first.

        The path must not be used afterwards.
        """
        published = self.pool.published
        moment = published.next_moment()
        for segment in self.segments():
            published.dereference(segment, moment)

    def covers(self, block: int) -> bool:
        """Returns whether the block number `block` is referenced."""
        for start, stop in self.spans:  # noqa: SIM110 - a generator costs several times as much
            if start <= block < stop:
                return True
        return False

    def split_off(self, block: int, split: Callable[[Segment, int], Segment]) -> HeldPath:
        """Moves the references before `block` to a new path, and returns that path.

        `split` is called if a segment must be divided at `block`; it returns the upper part.
        """
        before = HeldPath(self.pool)
        before.spans = [(start, min(stop, block)) for start, stop in self.spans if start < block]
        self.spans = [(max(start, block), stop) for start, stop in self.spans if stop > block]
        segment = self.segment
        while segment is not None and segment.start >= block:
            segment = segment.parent
        if segment is not None and segment.end > block:
            segment = split(segment, block)
        before.segment = segment
        if not self.spans:
            self.segment = None
        return before

    def gaps(self, start: int, stop: int) -> Iterator[Span]:
        """Yields the parts of ``start..stop`` that are not referenced."""
        for low, high in self.spans:
            if low >= stop:
                break
            if start < low:
                yield start, low
            start = max(start, high)
        if start < stop:
            yield start, stop


@dataclass(slots=True, eq=False)
class HeldBlocks(HeldPath):
    """The blocks ``first..stop`` that a sequence holds in one pool.

    The blocks in `spans` are published, and referenced in the tree; the others are private.

    Attributes:
        ids: one id per block of the sequence; `NOT_HELD` outside ``first..stop``. While a load
            fills the last blocks, those between them and the reserved tokens are `NOT_HELD`, too.
        first: the blocks before this number were released, or never held.
        stop: the blocks from this number on are not reserved yet.
        duplicate: whether a block was published by another sequence before. With full attention,
            no later block may then be published while this sequence runs.
        inherited: the retention of the block that was copied in admission.
    """

    ids: BlockIds = field(default_factory=new_ids)
    first: int = 0
    stop: int = 0
    duplicate: bool = False
    inherited: Retention = DEFAULT_RETENTION

    @property
    def is_published(self) -> bool:
        """Returns whether none of the held blocks is private."""
        spans = self.spans
        if len(spans) == 1:
            return spans[0] == (self.first, self.stop)
        return self.first == self.stop

    def ids_held(self) -> Iterator[BlockIds]:
        """Yields the ids of all blocks of the sequence; `NOT_HELD` for those not held."""
        yield self.ids

    def first_private(self, stop: int) -> int:
        """Returns the number of the first private block before `stop`, or `stop`."""
        at = self.first
        for low, high in self.spans:
            if low > at:
                break
            at = high
        return at if at < self.stop and at < stop else stop

    def private_ids(self, start: int, stop: int) -> BlockIds:
        """Returns the ids of the private blocks among ``start..stop``."""
        ids = new_ids()
        if not self.is_published:
            for low, high in self.gaps(max(start, self.first), min(stop, self.stop)):
                ids.extend(self.ids[low:high])
        if self.pool.window is not None and NOT_HELD in ids:
            return array("i", [one for one in ids if one != NOT_HELD])
        return ids

    def num_missing(self, start: int = 0) -> int:
        """Returns how many of the blocks ``first..stop`` from `start` on are not reserved yet."""
        return self.ids[max(start, self.first) : self.stop].count(NOT_HELD)


@dataclass(slots=True, eq=False)
class PinnedPath(HeldPath):
    """The blocks that a pin holds in one pool.

    Attributes:
        first, end: the pin also holds the private blocks ``first..end`` of its sequence.
        loose: the private blocks that only pins hold, no sequence any more.
    """

    first: int = 0
    end: int = 0
    loose: BlockIds = field(default_factory=new_ids)

    def ids_held(self) -> Iterator[BlockIds]:
        """Yields the ids of the loose blocks, and of the referenced primary blocks."""
        yield self.loose
        yield from HeldPath.ids_held(self)  # a class with slots is made anew: no super()

    def holds(self, start: int, stop: int) -> bool:
        """Returns whether all blocks ``start..stop`` of the pin's sequence were pinned."""
        return self.first <= start and stop <= self.end
