"""A set of keys that is kept in order."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator

_CHUNK = 512


class SortedKeys:
    """A set of keys in ascending order. It is kept in chunks, so that `add` moves few keys."""

    __slots__ = ("_chunks", "_firsts")

    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        ordered = sorted(keys)
        self._chunks = [ordered[at : at + _CHUNK] for at in range(0, len(ordered), _CHUNK)]
        self._firsts = [chunk[0] for chunk in self._chunks]

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            yield from chunk

    def add(self, key: bytes) -> None:
        """Adds `key`, which must be new."""
        if not self._chunks:
            self._chunks.append([key])
            self._firsts.append(key)
            return
        number = max(bisect_right(self._firsts, key) - 1, 0)
        chunk = self._chunks[number]
        insort(chunk, key)
        self._firsts[number] = chunk[0]
        if len(chunk) > 2 * _CHUNK:
            self._chunks.insert(number + 1, chunk[_CHUNK:])
            self._firsts.insert(number + 1, chunk[_CHUNK])
            del chunk[_CHUNK:]

    def remove(self, key: bytes) -> None:
        """Removes `key`, which must be present."""
        number = bisect_right(self._firsts, key) - 1
        chunk = self._chunks[number]
        del chunk[bisect_left(chunk, key)]
        if chunk:
            self._firsts[number] = chunk[0]
        else:
            del self._chunks[number], self._firsts[number]

    def beside(self, low: bytes, high: bytes) -> tuple[bytes, bytes]:
        """Returns the last key less than `low`, and the first key not less than `high`.

        A key that does not exist is empty.
        """
        if not self._chunks:
            return b"", b""
        number, at = self._locate(low)
        if at:
            before = self._chunks[number][at - 1]
        else:
            before = self._chunks[number - 1][-1] if number else b""
        if high != low:
            number, at = self._locate(high)
        if at < len(self._chunks[number]):
            return before, self._chunks[number][at]
        return before, self._firsts[number + 1] if number + 1 < len(self._firsts) else b""

    def begun_by(self, prefix: bytes) -> Iterator[bytes]:
        """Yields the keys that begin with `prefix`, in order."""
        if not self._chunks:
            return
        number, at = self._locate(prefix)
        while number < len(self._chunks):
            chunk = self._chunks[number]
            for index in range(at, len(chunk)):  # a slice would copy the rest of the chunk
                if not chunk[index].startswith(prefix):
                    return
                yield chunk[index]
            number, at = number + 1, 0

    def _locate(self, key: bytes) -> tuple[int, int]:
        # The chunk where `key` is or would be, and its index there.
        number = max(bisect_right(self._firsts, key) - 1, 0)
        return number, bisect_left(self._chunks[number], key)
