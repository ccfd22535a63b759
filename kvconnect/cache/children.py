"""What begins where a segment ends, by the tokens of its first block."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvconnect.cache.segment import Segment

__all__ = ["Children", "SortedKeys"]

_CHUNK = 512


class SortedKeys:
    """Distinct keys in order, in chunks: adding one moves few, however many there are."""

    __slots__ = ("_chunks", "_firsts")

    def __init__(self) -> None:
        self._chunks: list[list[bytes]] = []
        self._firsts: list[bytes] = []

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            yield from chunk

    def add(self, key: bytes) -> None:
        """`key` must be new."""
        if not self._chunks:
            self._chunks.append([key])
            self._firsts.append(key)
            return
        place = max(bisect_right(self._firsts, key) - 1, 0)
        chunk = self._chunks[place]
        insort(chunk, key)
        self._firsts[place] = chunk[0]
        if len(chunk) > 2 * _CHUNK:
            self._chunks.insert(place + 1, chunk[_CHUNK:])
            self._firsts.insert(place + 1, chunk[_CHUNK])
            del chunk[_CHUNK:]

    def remove(self, key: bytes) -> None:
        """`key` must be there."""
        place = bisect_right(self._firsts, key) - 1
        chunk = self._chunks[place]
        del chunk[bisect_left(chunk, key)]
        if chunk:
            self._firsts[place] = chunk[0]
        else:
            del self._chunks[place], self._firsts[place]

    def before(self, key: bytes) -> bytes | None:
        """The last one before `key`."""
        place = bisect_left(self._firsts, key) - 1
        if place < 0:
            return None
        chunk = self._chunks[place]
        return chunk[bisect_left(chunk, key) - 1]

    def since(self, key: bytes) -> Iterator[bytes]:
        """`key`, if it is there, and those after it."""
        place = max(bisect_right(self._firsts, key) - 1, 0)
        for number, chunk in enumerate(self._chunks[place:]):
            yield from chunk if number else chunk[bisect_left(chunk, key) :]


class Children:
    """The segments that follow another one, each found by its whole first block, or by a part.

    Sorted, too, because the child that shares the longest prefix with some tokens is then beside
    the place where those would be, and all that share so much lie together.
    """

    __slots__ = ("_by_key", "_order")

    def __init__(self) -> None:
        self._by_key: dict[bytes, Segment] = {}
        self._order: SortedKeys | None = None

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._by_key.values())

    @property
    def keys(self) -> list[bytes]:
        """The first blocks, in order."""
        return [] if self._order is None else list(self._order)

    def get(self, key: bytes) -> Segment | None:
        """The child whose first block holds exactly `key`."""
        return self._by_key.get(key)

    def begun_by(self, prefix: bytes) -> Iterator[Segment]:
        """The children whose first block begins with `prefix`, or holds just that."""
        for key in self._order.since(prefix) if self._order is not None else ():
            if not key.startswith(prefix):
                return
            yield self._by_key[key]

    def beside(self, prefix: bytes, longest: int) -> tuple[bytes, bytes]:
        """The nearest first blocks before and after those that begin with `prefix`.

        Empty where there is none. No key has more than `longest` bytes.
        """
        if self._order is None:
            return b"", b""
        before = self._order.before(prefix)
        after = next(self._order.since(prefix + b"\xff" * longest), b"")
        return before or b"", after

    def add(self, key: bytes, segment: Segment) -> None:
        """`key` must be new."""
        self._by_key[key] = segment
        if self._order is None:
            self._order = SortedKeys()
        self._order.add(key)

    def replace(self, key: bytes, segment: Segment) -> None:
        """`segment` takes the place of the child that `key` names."""
        self._by_key[key] = segment

    def remove(self, key: bytes) -> None:
        """`key` must be there."""
        del self._by_key[key]
        if self._order is not None:
            self._order.remove(key)
