"""JSON text as it came: how much it makes of its bytes, and no key twice."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from kvconnect.text import shown

__all__ = ["TooManyValues", "parse_json"]

_MANY_PARTS = 1 << 16
_NBYTES_OF_PART = 64
_MANY_VALUES = 1 << 20
_NBYTES_OF_VALUE = 4
_LONG_LIST_NBYTES = 1 << 16
_PIECE_NBYTES = 1 << 15
_OF_NUMBERS = b"0123456789-, \t\r\n"
_BEGINNING = re.compile(rb"\[[0-9\-, \t\r\n]{64}")
_WINDOW_NBYTES = 1 << 17


class TooManyValues(ValueError):
    """There is more in the text than its size is for."""


def parse_json(text: bytes, *, max_nbytes: int) -> Any:
    """What `text` says; of a long text for a thread of its own.

    Long lists of integers are read in pieces: the interpreter does nothing else during one.

    What is made of a text is bounded, since lists, objects and keys take a hundred times as long
    as characters do: there may be 65,536 of them, and 1,048,576 values; of a longer text one for
    every 64, and one for every 4 bytes of `max_nbytes`.

    Args:
        text: in UTF-8.
        max_nbytes: that there might be of it.

    Raises:
        TooManyValues: there are more of them.
        ValueError: it is no JSON, nests deeper than 200, or an object has a key twice.
    """
    marks = _Marks(text)
    most_parts = max(_MANY_PARTS, max_nbytes // _NBYTES_OF_PART)
    most_values = max(_MANY_VALUES, max_nbytes // _NBYTES_OF_VALUE)
    if marks.parts > most_parts or marks.values > most_values:
        marks = _Marks(_between_strings(text))
        _check("lists, objects and keys", marks.parts, most_parts)
        _check("values", marks.values, most_values)
    parsed = _parse(text)
    if isinstance(parsed, dict) and len(parsed) == marks.keys:
        return parsed
    # Most texts hold no colon; for others it is worth while to look where they are.
    keys = _count_keys(parsed)
    if keys < marks.keys and keys < _Marks(_between_strings(text)).keys:
        json.loads(text, object_pairs_hook=_refuse_repeated)
    return parsed


class _Marks:
    """How much a text says, as far as its punctuation tells; what its strings hold counts, too.

    Attributes:
        keys: of objects.
        parts: lists, objects and keys.
        values: of all kinds.
    """

    __slots__ = ("keys", "parts", "values")

    def __init__(self, text: bytes) -> None:
        self.keys = text.count(b":")
        self.parts = self.keys + text.count(b"[") + text.count(b"{")
        self.values = text.count(b",") + 1


def _check(noun: str, found: int, most: int) -> None:
    if found > most:
        raise TooManyValues(f"{found} {noun}; at most {most} are taken")


def _between_strings(text: bytes) -> bytes:
    """`text`, if it is JSON, without its strings."""
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(plain.split(b'"')[::2])


def _parse(text: bytes) -> Any:
    """What `text` says, its long lists of integers put in piece by piece."""
    lists = _lists_of_integers(text)
    if not lists:
        return from_json(text, allow_inf_nan=False)
    # Each stands as a list of one number that is in no text.
    first = secrets.randbits(60)
    rest, end = [], 0
    for number, one in enumerate(lists):
        rest += [text[end : one.start], b"%d" % (first + number)]
        end = one.stop
    parsed = from_json(b"".join([*rest, text[end:]]), allow_inf_nan=False)
    for found in _containers(parsed):
        if isinstance(found, list) and len(found) == 1 and type(found[0]) is int:
            number = found[0] - first
            if 0 <= number < len(lists):
                found.clear()
                for piece in _pieces(text, lists[number]):
                    found.extend(from_json(piece, allow_inf_nan=False))
    return parsed


def _lists_of_integers(text: bytes) -> list[range]:
    """Where in `text` there is nothing but integers between two brackets, and much of it."""
    found: list[range] = []
    start, quotes, counted = _beginning(text, 0), 0, 0
    while start >= 0:
        end = _end_of_numbers(text, start + 1)
        is_list = text[end : end + 1] == b"]" and text.find(b",", start, end) >= 0
        if is_list and end - start > _LONG_LIST_NBYTES:
            before = text[counted:start].replace(b"\\\\", b"").replace(b'\\"', b"")
            quotes, counted = quotes + before.count(b'"'), start
            if quotes % 2 == 0:  # else it is a part of a string
                found.append(range(start + 1, end))
        start = _beginning(text, end)
    return found


def _beginning(text: bytes, start: int) -> int:
    """Where from `start` on a list may begin that is long; -1: nowhere."""
    # In windows, as a search is one call: a string may hold millions of brackets.
    while start < len(text):
        match = _BEGINNING.search(text, start, start + _WINDOW_NBYTES + 64)
        if match is not None:
            return match.start()
        start += _WINDOW_NBYTES
    return -1


def _end_of_numbers(text: bytes, start: int) -> int:
    """Where from `start` on there is something that is in no list of integers."""
    size = 64
    while piece := text[start : start + size]:
        rest = len(piece.lstrip(_OF_NUMBERS))
        start += len(piece) - rest
        if rest:
            break
        size = min(2 * size, _PIECE_NBYTES)
    return start


def _pieces(text: bytes, where: range) -> Iterator[bytes]:
    """The list between whose brackets is `where`, as shorter ones."""
    start, end = where.start, where.start
    while end >= 0:
        end = text.find(b",", start + _PIECE_NBYTES, where.stop)
        piece = text[start : where.stop if end < 0 else end]
        if not piece.strip():
            raise ValueError(f"a value is missing in a list, at byte {start}")
        yield b"[" + piece + b"]"
        start = end + 1


def _containers(parsed: object) -> Iterator[list[Any] | dict[str, Any]]:
    """All lists and objects in `parsed`, itself included."""
    left = [parsed]
    while left:
        one = left.pop()
        if isinstance(one, (list, dict)):
            inside = one if isinstance(one, list) else list(one.values())
            for start in range(0, len(inside), _PIECE_NBYTES):
                piece = inside[start : start + _PIECE_NBYTES]
                if not _CONTAINERS.isdisjoint(map(type, piece)):
                    left += [each for each in piece if type(each) in _CONTAINERS]
            yield one


def _count_keys(parsed: object) -> int:
    """The keys of all objects in `parsed`."""
    return sum(len(one) for one in _containers(parsed) if isinstance(one, dict))


_CONTAINERS = frozenset({dict, list})


def _refuse_repeated(pairs: list[tuple[str, object]]) -> None:
    """Nothing, if no key of an object is there twice."""
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"the key {shown(key)} is there twice")
        seen.add(key)
