"""The state of a run of blocks in one pool."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

from kvconnect.cache.tree.retention import DEFAULT_RETENTION, Retention

BlockIds: TypeAlias = "array[int]"
"""Block ids as C ints of four bytes, which are sliced, extended and cut at memcpy speed."""

Span: TypeAlias = tuple[int, int]
"""The block numbers of a path from the first number up to, and without, the second."""

_NO_IDS: BlockIds = array("i")


def new_ids() -> BlockIds:
    """Returns an empty array of ids."""
    return _NO_IDS[:]  # half the time of making one


@dataclass(slots=True, eq=False)
class Residence:
    """The state of a segment's blocks in one pool.

    Attributes:
        ids: one primary block per block of the segment; ``None`` if not in primary.
        host_ids: one secondary block per block of the segment; ``None`` if not in secondary. With
            both, both copies are valid.
        references: the number of sequences and pins that hold these blocks.
        retention: the priority and its duration.
        expires: when `retention` reverts to the default; ``inf`` if never, or if the blocks were
            not released since `retention` was set.
        stamp: the moment of the last release or partial copy. Of equal moments, later blocks are
            older. Negative if never released, in order of publication.
        primary_below: how many child segments are in primary.
        resident_below: how many child segments are in primary or secondary.
    """

    ids: BlockIds | None = None
    host_ids: BlockIds | None = None
    references: int = 0
    retention: Retention = DEFAULT_RETENTION
    expires: float = inf
    stamp: int = 0
    primary_below: int = 0
    resident_below: int = 0

    @property
    def is_resident(self) -> bool:
        """Returns whether the blocks are in primary or secondary."""
        return self.ids is not None or self.host_ids is not None

    def divide(self, count: int) -> Residence:
        """Splits off the state of the first `count` blocks and returns it; the rest stays here."""
        upper = Residence()
        if self.ids is not None:
            upper.ids, self.ids = self.ids, self.ids[count:]
            del upper.ids[count:]
            upper.primary_below = upper.resident_below = 1
        if self.host_ids is not None:
            upper.host_ids, self.host_ids = self.host_ids, self.host_ids[count:]
            del upper.host_ids[count:]
            upper.resident_below = 1
        upper.references = self.references
        upper.retention = self.retention
        upper.expires = self.expires
        upper.stamp = self.stamp
        return upper

    def goes_on_as(self, below: Residence) -> bool:
        """Returns whether these blocks and the following ones, `below`, are in the same state."""
        if not self.is_resident:
            return not below.is_resident
        return (
            self.references == below.references
            and (self.ids is None) == (below.ids is None)
            and (self.host_ids is None) == (below.host_ids is None)
            and (self.stamp, self.expires) == (below.stamp, below.expires)
            and self.retention == below.retention
        )

    def absorb(self, upper: Residence) -> None:
        """Adds the blocks of `upper`, which precede these and have the same state."""
        self.stamp = upper.stamp  # they may differ for blocks that are in neither tier
        if self.ids is not None and upper.ids is not None:
            self.ids = upper.ids + self.ids
        if self.host_ids is not None and upper.host_ids is not None:
            self.host_ids = upper.host_ids + self.host_ids
