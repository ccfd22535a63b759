"""A run of blocks as one node of the radix tree."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import TypeAlias

from kvconnect.cache.tree.retention import DEFAULT_RETENTION, Retention
from kvconnect.cache.tree.sorted_keys import SortedKeys
from kvconnect.keys import BlockKey, NamespaceId

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


class Children(dict[bytes, "Segment"]):
    """The child segments of a segment, by the token bytes of their whole first block.

    The keys are also kept sorted. So the child with the longest common prefix with some tokens is a
    neighbour of the position that the tokens would have. Children with an equally long common
    prefix are neighbours of each other.

    Attributes:
        order: the sorted keys; made when first needed, as most segments have one child at most.
        recent: the keys by the last release in group 0, the latest at the end; made when first
            needed.
    """

    __slots__ = ("order", "recent")

    def __init__(self) -> None:
        self.order: SortedKeys | None = None
        self.recent: dict[bytes, None] | None = None

    def begun_by(self, prefix: bytes) -> Iterator[Segment]:
        """Yields the children whose key begins with `prefix`, in the order of the keys."""
        return map(self.__getitem__, self._sorted().begun_by(prefix) if self else ())

    def beside(self, low: bytes, high: bytes) -> tuple[bytes, bytes]:
        """Returns the last key less than `low`, and the first key not less than `high`.

        A key that does not exist is empty.
        """
        return self._sorted().beside(low, high) if self else (b"", b"")

    def latest(self, prefix: bytes, most: int) -> Iterator[Segment]:
        """Yields children whose key begins with `prefix`, the last released first.

        Only the `most` last entries of `recent` are searched. Children that were never released are
        at any position there.
        """
        if self.recent is None:
            self.recent = dict.fromkeys(sorted(self, key=lambda key: self[key].pools[0].stamp))
        for key in islice(reversed(self.recent), most):
            if key.startswith(prefix):
                yield self[key]

    def let_go(self, key: bytes) -> None:
        """Moves the child `key`, which was released or used just now, to the end of `recent`."""
        if self.recent is not None:
            del self.recent[key]
            self.recent[key] = None

    def add(self, key: bytes, segment: Segment) -> None:
        """Adds `segment` under `key`, which must be new."""
        self[key] = segment
        if self.order is not None:
            self.order.add(key)
        if self.recent is not None:
            self.recent[key] = None

    def remove(self, key: bytes) -> None:
        """Removes `key`, which must be present."""
        del self[key]
        if self.order is not None:
            self.order.remove(key)
        if self.recent is not None:
            del self.recent[key]

    def _sorted(self) -> SortedKeys:
        if self.order is None:
            self.order = SortedKeys(self)
        return self.order


_NO_CHILDREN = Children()
"""The shared empty children of every segment that never had a child."""


class Segment:
    """A run of consecutive blocks of one path that are in the same state, in every pool.

    A root has no blocks and no parent. A tail has one block of less than `tokens_per_block` tokens
    and never children. All other segments have whole blocks. A segment whose blocks are in no pool
    exists only while a pool has blocks below it. A split keeps this object as the lower part, so a
    reference to the deepest segment of a path still refers to that path.

    Attributes:
        parent: the segment before the first block; ``None`` for a root.
        children: the segments after the last block; see `add_child`.
        start: the number of the first block on the path from the root.
        end: the number of the last block plus one.
        tokens: the tokens of all blocks as native int32 bytes.
        pools: the state in each pool group.
        keys: the chained keys of leading blocks that the key index has hashed, 32 bytes each.
    """

    __slots__ = ("children", "end", "keys", "parent", "pools", "start", "tokens")

    def __init__(
        self, parent: Segment | None, start: int, end: int, tokens: bytearray, num_pools: int
    ) -> None:
        self.parent = parent
        self.children = _NO_CHILDREN
        self.start = start
        self.end = end
        self.tokens = tokens
        self.pools = [Residence() for _ in range(num_pools)]
        self.keys = bytearray()

    def __len__(self) -> int:
        """Returns the number of blocks."""
        return self.end - self.start

    @property
    def is_resident(self) -> bool:
        """Returns whether any pool has the blocks of this segment."""
        for state in self.pools:  # noqa: SIM110 - a generator costs several times as much
            if state.ids is not None or state.host_ids is not None:
                return True
        return False

    def add_child(self, key: bytes, child: Segment) -> None:
        """Adds `child` under `key`, the tokens of its first block; `key` must be new."""
        if self.children is _NO_CHILDREN:
            self.children = Children()
        self.children.add(key, child)

    def path(self, first: int = 0) -> list[Segment]:
        """Returns the segments of the path from block `first` down to this one, in order.

        A segment must begin at block `first`.
        """
        path = []
        segment = self
        while segment.parent is not None and segment.start >= first:
            path.append(segment)
            segment = segment.parent
        path.reverse()
        return path


class Root(Segment):
    """The root of the paths of a namespace: no blocks, no parent.

    Attributes:
        namespace: the namespace of the paths.
        chain_root: the key before the first block; ``None`` until a sequence comes with a chain.
    """

    __slots__ = ("chain_root", "namespace")

    def __init__(self, namespace: NamespaceId, num_pools: int) -> None:
        super().__init__(None, 0, 0, bytearray(), num_pools)
        self.namespace = namespace
        self.chain_root: BlockKey | None = None
