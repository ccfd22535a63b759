"""What begins where a segment ends, by the tokens of its first block."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvconnect.cache.tree.segment import Segment

__all__ = ["Children", "SortedKeys"]

_CHUNK = 512


class SortedKeys:
    """Distinct keys in order, in chunks: adding one moves few, however many there are."""

    __slots__ = ("_chunks", "_firsts")

    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        ordered = sorted(keys)
        self._chunks = [ordered[at : at + _CHUNK] for at in range(0, len(ordered), _CHUNK)]
        self._firsts = [chunk[0] for chunk in self._chunks]

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

    def beside(self, low: bytes, high: bytes) -> tuple[bytes, bytes]:
        """The last one before `low`, and the first one from `high` on; empty: there is none."""
        if not self._chunks:
            return b"", b""
        place, at = self._place(low)
        if at:
            before = self._chunks[place][at - 1]
        else:
            before = self._chunks[place - 1][-1] if place else b""
        if high != low:
            place, at = self._place(high)
        if at < len(self._chunks[place]):
            return before, self._chunks[place][at]
        return before, self._firsts[place + 1] if place + 1 < len(self._firsts) else b""

    def begun_by(self, prefix: bytes) -> Iterator[bytes]:
        """Those that begin with `prefix`, or are just that."""
        if not self._chunks:
            return
        place, at = self._place(prefix)
        while place < len(self._chunks):
            chunk = self._chunks[place]
            for number in range(at, len(chunk)):  # a slice would touch all that is left of it
                if not chunk[number].startswith(prefix):
                    return
                yield chunk[number]
            place, at = place + 1, 0

    def _place(self, key: bytes) -> tuple[int, int]:
        # The chunk where `key` is or would be, and its place there.
        place = max(bisect_right(self._firsts, key) - 1, 0)
        return place, bisect_left(self._chunks[place], key)


class Children(dict[bytes, "Segment"]):
    """The segments that follow another one, each found by its whole first block.

    Sorted, too, because the child that shares the longest prefix with some tokens is then beside
    the place where those would be, and all that share so much lie together.

    Attributes:
        order: the first blocks, once somebody asked: most segments have one child at most.
        recent: the same, those last that were let go last in group 0; once somebody asked.
    """

    __slots__ = ("order", "recent")

    def __init__(self) -> None:
        self.order: SortedKeys | None = None
        self.recent: dict[bytes, None] | None = None

    def begun_by(self, prefix: bytes) -> Iterator[Segment]:
        """The children whose first block begins with `prefix`, or holds just that."""
        return map(self.__getitem__, self._sorted().begun_by(prefix) if self else ())

    def beside(self, low: bytes, high: bytes) -> tuple[bytes, bytes]:
        """The last first block before `low`, and the first one from `high` on; empty: none."""
        return self._sorted().beside(low, high) if self else (b"", b"")

    def latest(self, prefix: bytes, most: int) -> Iterator[Segment]:
        """Of the `most` children that were let go last, those begun by `prefix`; the last first.

        Children that nobody let go so far are among them in any place.
        """
        if self.recent is None:
            self.recent = dict.fromkeys(sorted(self, key=lambda key: self[key].pools[0].stamp))
        for key in islice(reversed(self.recent), most):
            if key.startswith(prefix):
                yield self[key]

    def let_go(self, key: bytes) -> None:
        """The child that `key` names was let go, or used, just now; see `recent`."""
        if self.recent is not None:
            del self.recent[key]
            self.recent[key] = None

    def add(self, key: bytes, segment: Segment) -> None:
        """`key` must be new."""
        self[key] = segment
        if self.order is not None:
            self.order.add(key)
        if self.recent is not None:
            self.recent[key] = None

    def replace(self, key: bytes, segment: Segment) -> None:
        """`segment` takes the place of the child that `key` names."""
        self[key] = segment

    def remove(self, key: bytes) -> None:
        """`key` must be there."""
        del self[key]
        if self.order is not None:
            self.order.remove(key)
        if self.recent is not None:
            del self.recent[key]

    def _sorted(self) -> SortedKeys:
        if self.order is None:
            self.order = SortedKeys(self)
        return self.order
