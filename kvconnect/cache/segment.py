"""A run of blocks as one node of the radix tree."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from typing import TypeAlias

from kvconnect.cache.retention import DEFAULT_RETENTION, Retention
from kvconnect.keys import BlockKey, Namespace

__all__ = ["BlockIds", "Children", "Root", "Segment", "new_ids"]

BlockIds: TypeAlias = "array[int]"
"""C ints: four bytes an id, sliced, extended and cut at memcpy speed."""


def new_ids() -> BlockIds:
    """No ids."""
    return array("i")


class Children:
    """The segments that begin where another one ends, sorted by the tokens of their first block.

    Sorted, because the child that shares the longest prefix with some tokens is then beside the
    place where those would be inserted, and all that share so much lie together.
    """

    __slots__ = ("keys", "segments")

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.segments: list[Segment] = []

    def __len__(self) -> int:
        return len(self.segments)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.segments)

    def get(self, key: bytes) -> Segment | None:
        """The child whose first block holds exactly `key`."""
        place = bisect_left(self.keys, key)
        if place < len(self.keys) and self.keys[place] == key:
            return self.segments[place]
        return None

    def begun_by(self, key: bytes) -> Segment | None:
        """A child whose first block begins with `key`, or holds just that."""
        place = bisect_left(self.keys, key)
        if place < len(self.keys) and self.keys[place].startswith(key):
            return self.segments[place]
        return None

    def place(self, key: bytes) -> int:
        """How many children sort before `key`."""
        return bisect_left(self.keys, key)

    def range(self, prefix: bytes, longest: int) -> tuple[int, int]:
        """From which to which child the first block begins with `prefix`; no key is `longest`er."""
        low = bisect_left(self.keys, prefix)
        return low, bisect_left(self.keys, prefix + b"\xff" * longest, low)

    def add(self, key: bytes, segment: Segment) -> None:
        """`key` must be new."""
        place = bisect_left(self.keys, key)
        self.keys.insert(place, key)
        self.segments.insert(place, segment)

    def replace(self, key: bytes, segment: Segment) -> None:
        """`segment` takes the place of the child that `key` names."""
        self.segments[bisect_left(self.keys, key)] = segment

    def remove(self, key: bytes) -> None:
        """`key` must be there."""
        place = bisect_left(self.keys, key)
        del self.keys[place], self.segments[place]


class Segment:
    """Consecutive blocks of one path that agree in everything but tokens and id.

    A root has no blocks and no parent; a tail has one block of less than `tokens_per_block` tokens
    and never children. All other segments hold whole blocks. Splitting keeps this object as the
    lower
    part: whoever holds a segment as the deepest of a path still holds that path.

    Attributes:
        parent: what the first block follows; ``None`` for a root.
        children: what follows the last block.
        start: blocks before the first one.
        tokens: of all blocks, as native int32 bytes.
        ids: one block id per block.
        references: sequences and pins that hold these blocks.
        retention: priority and duration.
        expires: when `retention` reverts to the default; ``inf``: never, or not let go since it was
            set.
        stamp: moment of the last dereference or partial copy; block order breaks ties, later blocks
            are older. Below zero: never let go, in order of publishing.
        ticket: of its valid entry in the reclaim queue; 0: none.
        keys: chained keys of the leading blocks, as far as the key index hashed them.
    """

    __slots__ = (
        "children",
        "expires",
        "ids",
        "keys",
        "parent",
        "references",
        "retention",
        "stamp",
        "start",
        "ticket",
        "tokens",
    )

    def __init__(
        self, parent: Segment | None, start: int, tokens: bytearray, ids: BlockIds
    ) -> None:
        self.parent = parent
        self.children = Children()
        self.start = start
        self.tokens = tokens
        self.ids = ids
        self.references = 0
        self.retention: Retention = DEFAULT_RETENTION
        self.expires = float("inf")
        self.stamp = 0
        self.ticket = 0
        self.keys: list[BlockKey] = []

    @property
    def end(self) -> int:
        """Blocks up to and including the last one."""
        return self.start + len(self.ids)

    @property
    def is_free_leaf(self) -> bool:
        """Whether its last block may be taken: nobody holds it and nothing follows it."""
        return self.references == 0 and not self.children and self.parent is not None

    def path(self) -> list[Segment]:
        """The segments from the first below the root down to this one."""
        path = []
        segment = self
        while segment.parent is not None:
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

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(None, 0, bytearray(), new_ids())
        self.namespace = namespace
        self.chain_root: BlockKey | None = None
