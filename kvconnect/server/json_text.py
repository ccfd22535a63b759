"""JSON text as it came: how much it makes of its bytes, and no key twice."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import from_json

from kvconnect.text import shown

__all__ = ["TooManyValues", "parse_json"]

_MANY_PARTS = 1 << 16
_NBYTES_OF_PART = 64
_MANY_VALUES = 1 << 20
_NBYTES_OF_VALUE = 4


class TooManyValues(ValueError):
    """There is more in the text than its size is for."""


def parse_json(text: bytes, *, max_nbytes: int) -> Any:
    """What `text` says. The interpreter does nothing else meanwhile.

    That is bounded, since lists, objects and keys take a hundred times as long as characters do:
    there may be 65,536 of them, and 1,048,576 values; of a longer text one for every 64, and one
    for every 4 bytes of `max_nbytes`.

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
    parsed = from_json(text, allow_inf_nan=False)
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


def _count_keys(parsed: object) -> int:
    """The keys of all objects in `parsed`."""
    found, left = 0, [parsed]
    while left:
        one = left.pop()
        inside = one
        if isinstance(one, dict):
            found += len(one)
            inside = list(one.values())
        if isinstance(inside, list) and not _CONTAINERS.isdisjoint(map(type, inside)):
            left += [each for each in inside if type(each) in _CONTAINERS]
    return found


_CONTAINERS = frozenset({dict, list})


def _refuse_repeated(pairs: list[tuple[str, object]]) -> None:
    """Nothing, if no key of an object is there twice."""
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"the key {shown(key)} is there twice")
        seen.add(key)
