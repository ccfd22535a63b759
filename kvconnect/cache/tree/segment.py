"""A run of blocks as one node of the radix tree."""

from __future__ import annotations

from array import array
from math import inf
from typing import TypeAlias

from kvconnect.cache.tree.children import Children
from kvconnect.cache.tree.retention import DEFAULT_RETENTION, Retention
from kvconnect.keys import BlockKey, Namespace

__all__ = ["BlockIds", "Residence", "Root", "Segment", "Span", "new_ids"]

BlockIds: TypeAlias = "array[int]"
"""C ints: four bytes an id, sliced, extended and cut at memcpy speed."""


Span: TypeAlias = tuple[int, int]
"""Block numbers of a path, from the first up to and without the second."""


_NO_IDS: BlockIds = array("i")


def new_ids() -> BlockIds:
    """No ids."""
    return _NO_IDS[:]  # half the time of making one


class Residence:
    """Where the blocks of a segment are in one pool, and what is known of them there.

    Attributes:
        ids: one primary block per block of the segment; ``None``: not in primary.
        host_ids: the same in secondary. With both, the host copy is valid, too.
        references: sequences and pins that hold these blocks.
        retention: priority and duration.
        expires: when `retention` reverts to the default; ``inf``: never, or not let go since it was
            set.
        stamp: moment of the last dereference or partial copy; block order breaks ties, later blocks
            are older. Below zero: never let go, in order of publishing.
        primary_below: child segments with blocks in primary.
        resident_below: child segments with blocks in primary or secondary.
    """

    __slots__ = (
        "expires",
        "host_ids",
        "ids",
        "primary_below",
        "references",
        "resident_below",
        "retention",
        "stamp",
    )

    def __init__(self) -> None:
        self.ids: BlockIds | None = None
        self.host_ids: BlockIds | None = None
        self.references = 0
        self.retention: Retention = DEFAULT_RETENTION
        self.expires = inf
        self.stamp = 0
        self.primary_below = 0
        self.resident_below = 0

    @property
    def is_resident(self) -> bool:
        """Whether the blocks are in primary or secondary."""
        return self.ids is not None or self.host_ids is not None

    def divide(self, count: int) -> Residence:
        """Split off the state of the first `count` blocks; this object keeps that of the others."""
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
        """Whether nobody holds these blocks nor those `below`, and both are in the same state."""
        if not self.is_resident:
            return not below.is_resident
        return (
            self.references == below.references == 0
            and (self.ids is None) == (below.ids is None)
            and (self.host_ids is None) == (below.host_ids is None)
            and (self.stamp, self.expires) == (below.stamp, below.expires)
            and self.retention == below.retention
        )

    def absorb(self, upper: Residence) -> None:
        """Take in the blocks of `upper`, which stand before these and go on as these."""
        if self.ids is not None and upper.ids is not None:
            self.ids = upper.ids + self.ids
        if self.host_ids is not None and upper.host_ids is not None:
            self.host_ids = upper.host_ids + self.host_ids


_NO_CHILDREN = Children()
"""Of every segment that never had one: most."""


class Segment:
    """Consecutive blocks of one path that are in the same state, in every pool.

    A root has no blocks and no parent; a tail has one block of less than `tokens_per_block` tokens
    and never children. All other segments hold whole blocks. One that no pool has blocks of is
    there because something below it is. Splitting keeps this object as the lower part: whoever
    holds a segment as the deepest of a path still holds that path.

    Attributes:
        parent: what the first block follows; ``None`` for a root.
        children: what follows the last block; see `add_child`.
        start: blocks before the first one.
        end: blocks up to and including the last one.
        tokens: of all blocks, as native int32 bytes.
        pools: the state in each pool group.
        keys: chained keys of the leading blocks, as far as the key index knows them, 32 bytes each.
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
        """Blocks."""
        return self.end - self.start

    @property
    def is_resident(self) -> bool:
        """Whether any pool has its blocks."""
        for state in self.pools:  # noqa: SIM110 - a generator costs several times as much
            if state.ids is not None or state.host_ids is not None:
                return True
        return False

    def add_child(self, key: bytes, child: Segment) -> None:
        """`child` follows; `key` is its first block, and no other child begins with that."""
        if self.children is _NO_CHILDREN:
            self.children = Children()
        self.children.add(key, child)

    def path(self, first: int = 0) -> list[Segment]:
        """The segments from the one that begins with block number `first` down to this one."""
        path = []
        segment = self
        while segment.parent is not None and segment.start >= first:
            path.append(segment)
            segment = segment.parent
        path.reverse()
        return path


class Root(Segment):
    """Where the paths of a namespace begin: no blocks, no parent.

    Attributes:
        namespace: whose.
        chain_root: the key before the first block, once a sequence brought it.
    """

    __slots__ = ("chain_root", "namespace")

    def __init__(self, namespace: Namespace, num_pools: int) -> None:
        super().__init__(None, 0, 0, bytearray(), num_pools)
        self.namespace = namespace
        self.chain_root: BlockKey | None = None
