"""A live sequence, and the handles that keep blocks beyond it."""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt

from kvconnect.cache.block_pool import BlockPool
from kvconnect.cache.resource_manager import PinnedBlocks
from kvconnect.cache.retention import DEFAULT_RETENTION, Retention, RetentionPlan
from kvconnect.cache.segment import BlockIds, Segment, Span, new_ids
from kvconnect.keys import KeyChain, Namespace

__all__ = ["NOT_HELD", "Grip", "PinGrip", "PinHandle", "Sequence", "as_id_array", "no_ids"]

NOT_HELD = -1
"""In the place of a block id: given up, or not reserved yet."""

_ONE_PLACE = array("i", [NOT_HELD])


def as_id_array(ids: BlockIds) -> npt.NDArray[np.int32]:
    """A copy of `ids` that the caller owns."""
    return np.array(ids, np.int32)


def no_ids(count: int) -> BlockIds:
    """`count` places without a block."""
    return _ONE_PLACE * count


class PathGrip:
    """References to parts of one path in one pool.

    Attributes:
        pool: which.
        segment: the deepest one referenced; ``None``: none.
        spans: which blocks of the path down to it are referenced; in order and apart. They begin
            and end where segments do.
    """

    __slots__ = ("pool", "segment", "spans")

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.segment: Segment | None = None
        self.spans: list[Span] = []

    def add(self, segment: Segment, start: int, stop: int) -> None:
        """The blocks ``start..stop``, of which `segment` has the last, are referenced, too."""
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
        """What is referenced, the deepest first."""
        step = self.segment
        for first, stop in reversed(self.spans):
            while step is not None and step.end > first:
                if step.start < stop:
                    yield step
                step = step.parent

    def claim(self) -> None:
        """One more holder of all that."""
        published = self.pool.published
        for segment in self.segments():
            published.reference(segment)

    def let_go(self) -> None:
        """One holder less of all that, last block first; the grip is not to be used any more."""
        published = self.pool.published
        moment = published.next_moment()
        for segment in self.segments():
            published.dereference(segment, moment)

    def covers(self, block: int) -> bool:
        """Whether that block is referenced."""
        for start, stop in self.spans:  # noqa: SIM110 - a generator costs several times as much
            if start <= block < stop:
                return True
        return False

    def split_off(self, block: int, split: Callable[[Segment, int], Segment]) -> PathGrip:
        """What it references before `block`, as a grip of its own; this one keeps the rest.

        `split` divides a segment there, if need be, and returns the upper part.
        """
        before = PathGrip(self.pool)
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
        """The parts of ``start..stop`` that are not referenced."""
        for low, high in self.spans:
            if low >= stop:
                break
            if start < low:
                yield start, low
            start = max(start, high)
        if start < stop:
            yield start, stop


class Grip(PathGrip):
    """What a sequence holds in one pool: places ``first..stop`` of its blocks.

    The blocks in `spans` are published, and referenced in the tree; the others are private.

    Attributes:
        ids: one per block of the sequence; `NOT_HELD` outside ``first..stop``.
        first: places before it were given up, or never held.
        stop: places from it on are not reserved yet.
        duplicate: with full attention: a block turned out to be published by another sequence, so
            nothing after it may be published while this one runs.
        inherited: retention of the block that was copied in admission.
    """

    __slots__ = ("duplicate", "first", "ids", "inherited", "stop")

    def __init__(self, pool: BlockPool) -> None:
        super().__init__(pool)
        self.ids: BlockIds = new_ids()
        self.first = 0
        self.stop = 0
        self.duplicate = False
        self.inherited: Retention = DEFAULT_RETENTION

    @property
    def is_published(self) -> bool:
        """Whether none of its blocks is private."""
        spans = self.spans
        return len(spans) == 1 and spans[0] == (self.first, self.stop)

    def holds(self, start: int, stop: int) -> bool:
        """Whether it has all these blocks."""
        return self.first <= start and stop <= self.stop

    def first_private(self, stop: int) -> int:
        """The first block before `stop` that it holds and that is not published; `stop`: none."""
        at = self.first
        for low, high in self.spans:
            if low > at:
                break
            at = high
        return at if at < self.stop and at < stop else stop

    def private_ids(self, start: int, stop: int) -> BlockIds:
        """The ids of the blocks ``start..stop`` that it holds and that are not published."""
        ids = new_ids()
        if not self.is_published:
            for low, high in self.gaps(max(start, self.first), min(stop, self.stop)):
                ids.extend(self.ids[low:high])
        return ids


class PinGrip(PathGrip):
    """What a pin holds in one pool.

    Attributes:
        first, end: the places of its sequence whose private blocks it holds, too.
        loose: private blocks that no sequence has any more.
    """

    __slots__ = ("end", "first", "loose")

    def __init__(self, pool: BlockPool) -> None:
        super().__init__(pool)
        self.first = 0
        self.end = 0
        self.loose: BlockIds = new_ids()

    def holds(self, start: int, stop: int) -> bool:
        """Whether all these blocks of its sequence were pinned."""
        return self.first <= start and stop <= self.end


class PinHandle(PinnedBlocks):
    """Blocks that stay until they are unpinned.

    Attributes:
        block_ids: int32, the blocks of group 0 in order of their tokens, as of when they were
            pinned; -1 where there is none, or only in secondary.
        sequence: whose private blocks it holds, too; ``None``: none, or it ended.
        grips: by pool group.
        shares_private: whether it was made of a sequence.
    """

    __slots__ = ("block_ids", "grips", "sequence", "shares_private")

    def __init__(self, block_ids: npt.NDArray[np.int32], pools: Items[BlockPool]) -> None:
        self.block_ids = block_ids
        self.sequence: Sequence | None = None
        self.grips = [PinGrip(pool) for pool in pools]
        self.shares_private = False

    def __len__(self) -> int:
        return len(self.block_ids)


class Sequence:
    """The tokens and blocks of one request.

    Attributes:
        tokens: as native int32 bytes.
        grips: what it holds, by pool group.
        offered: leading blocks that were offered to the tree.
        computed: leading tokens that were matched or committed.
        matched: leading tokens that were matched.
        reserved: leading tokens that there are blocks for in every pool.
        plan: retention by block.
        chain: keys of its full blocks.
        pins: handles that hold private blocks of it.
    """

    __slots__ = (
        "chain",
        "computed",
        "grips",
        "matched",
        "namespace",
        "offered",
        "pins",
        "plan",
        "reserved",
        "tokens",
    )

    def __init__(
        self,
        namespace: Namespace,
        tokens: bytearray,
        plan: RetentionPlan,
        chain: KeyChain | None,
        pools: Items[BlockPool],
    ) -> None:
        self.namespace = namespace
        self.tokens = tokens
        self.plan = plan
        self.chain = chain
        self.grips: Items[Grip] = [Grip(pool) for pool in pools]
        self.offered = 0
        self.computed = 0
        self.matched = 0
        self.reserved = 0
        self.pins: list[PinHandle] = []

    @property
    def num_tokens(self) -> int:
        """Prompt and appended tokens."""
        return len(self.tokens) // 4

    @property
    def num_blocks(self) -> int:
        """Blocks that its tokens need."""
        return len(self.grips[0].ids)

    @property
    def is_published(self) -> bool:
        """Whether it has no private block."""
        for grip in self.grips:  # noqa: SIM110 - a generator costs several times as much
            if not grip.is_published:
                return False
        return True

    def forget(self, grip: Grip, start: int, stop: int) -> BlockIds:
        """It gives up these places of one of its grips; returns the private blocks there.

        Pins that hold those keep them, loose.
        """
        for pin in self.pins:
            held = pin.grips[grip.pool.group]
            held.loose.extend(grip.private_ids(max(start, held.first), min(stop, held.end)))
        private = grip.private_ids(start, stop)
        start, stop = max(start, grip.first), min(stop, grip.stop)
        if start < stop:
            grip.ids[start:stop] = no_ids(stop - start)
        return private

    def disband(self) -> None:
        """The sequence ended, and its pins hold only what they have themselves."""
        for pin in self.pins:
            pin.sequence = None
        self.pins.clear()
