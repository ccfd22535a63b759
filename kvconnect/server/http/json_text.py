"""Parses JSON text with limits on its values, and refuses repeated keys."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import jiter

from kvconnect.text import shown

__all__ = ["TooManyValues", "parse_json"]

_MANY_PARTS = 1 << 16
_NBYTES_OF_PART = 64
_MANY_VALUES = 1 << 20
_NBYTES_OF_VALUE = 4


class TooManyValues(ValueError):
    """The error of a text with more values than its size allows."""


def parse_json(text: bytes, *, max_nbytes: int) -> Any:
    """Returns the JSON value of `text`. Call it on another thread if `text` is long.

    The number of values is bounded, since lists, objects and keys take a hundred times as long as
    characters do. A text may have 65,536 lists, objects and keys, or one for every 64 bytes of
    `max_nbytes` if that is more; and 1,048,576 values, or one for every 4 bytes.

    Args:
        text: in UTF-8.
        max_nbytes: the most bytes of a text.

    Raises:
        TooManyValues: `text` has more of them.
        ValueError: `text` is no JSON, nests deeper than 200, or an object has a key twice.
    """
    most_parts = max(_MANY_PARTS, max_nbytes // _NBYTES_OF_PART)
    most_values = max(_MANY_VALUES, max_nbytes // _NBYTES_OF_VALUE)
    if _parts(text) > most_parts or _values(text) > most_values:
        plain = _between_strings(text)  # the content of strings does not count
        _check("lists, objects and keys", _parts(plain), most_parts)
        _check("values", _values(plain), most_values)
    try:
        return jiter.from_json(text, allow_inf_nan=False, catch_duplicate_keys=True)
    except ValueError as error:
        if "duplicate key" in str(error):
            with suppress(RecursionError):  # the value that follows that key
                json.loads(text, object_pairs_hook=_refuse_repeated)
        raise


def _parts(text: bytes) -> int:
    return text.count(b":") + text.count(b"[") + text.count(b"{")


def _values(text: bytes) -> int:
    return text.count(b",") + 1


def _check(noun: str, found: int, most: int) -> None:
    if found > most:
        raise TooManyValues(f"{found} {noun}; at most {most} are taken")


def _between_strings(text: bytes) -> bytes:
    """Returns the JSON `text` without its strings."""
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(plain.split(b'"')[::2])


def _refuse_repeated(pairs: list[tuple[str, object]]) -> None:
    """Raises `ValueError` if an object has a key twice."""
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"the key {shown(key)} is there twice")
        seen.add(key)
