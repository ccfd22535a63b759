"""Checks of backends' answers: a backend whose answer is malformed counts as unavailable.

`counted` checks numbers of blocks, and checksums protect frames. This module checks the rest.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from math import inf

import numpy as np

from kvconnect.backend import Child, StoredEntry
from kvconnect.keys import KEY_NBYTES

_LONGEST_TEXT = 200
_brief = reprlib.Repr()
_brief.maxother = _LONGEST_TEXT


def wrong_in_children(answer: object) -> Iterator[object]:
    """Yields what in `answer` is no child with fields of the right types; or all of `answer`."""
    if not isinstance(answer, Sequence) or isinstance(answer, (str, bytes)):
        yield answer
    else:
        yield from (one for one in answer if not _is_child(one))


def is_entry(answer: object) -> bool:
    """Returns whether `answer` is an entry, with fields of the right types."""
    return (
        isinstance(answer, StoredEntry)
        and _is_key(answer.key)
        and (answer.parent is None or _is_key(answer.parent))
        and all(isinstance(one, int) for one in (answer.nbytes, answer.priority, answer.group))
        and _is_number(answer.created_at)
        and _is_number(answer.used_at)
        and (answer.tokens is None or _is_tokens(answer.tokens))
        and all(isinstance(one, bytes) for one in (answer.namespace, answer.model))
        and (answer.pinned_until == inf or _is_number(answer.pinned_until))
        and (answer.expires_at in (None, inf) or _is_number(answer.expires_at))
        and (answer.hits is None or isinstance(answer.hits, int))
    )


def wrong_in_entries(answer: object, count: int) -> Iterator[object]:
    """Yields what in `answer` is neither an entry nor ``None``; or all, if not `count` elements."""
    if not isinstance(answer, Sequence) or len(answer) != count:
        yield answer
    else:
        yield from (one for one in answer if one is not None and not is_entry(one))


def wrong_in_flags(answer: object, count: int) -> Iterator[object]:
    """Yields what in `answer` is no ``bool``; or all of it, if it has not `count` elements."""
    if not isinstance(answer, Sequence) or len(answer) != count:
        yield answer
    else:
        yield from (one for one in answer if not isinstance(one, bool))


def wrong_in_numbers(answer: object) -> Iterator[object]:
    """Yields what in `answer` is no name of a finite number; all, if it is no mapping."""
    if not isinstance(answer, Mapping):
        yield answer
    else:
        for name, number in answer.items():
            if not isinstance(name, str) or not _is_number(number):
                yield {name: number}


def brief(value: object) -> str:
    """Returns `value` as a short text. Reads the beginning of a long list only.

    The event loop stands still meanwhile: the text of all of a long list takes seconds.
    """
    return _brief.repr(value)[:_LONGEST_TEXT]


def _is_child(value: object) -> bool:
    return isinstance(value, Child) and _is_key(value.key) and _is_tokens(value.tokens)


def _is_key(value: object) -> bool:
    return isinstance(value, bytes) and len(value) == KEY_NBYTES


def _is_tokens(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu"


def _is_number(value: object) -> bool:
    if isinstance(value, (np.integer, np.floating)):
        return bool(np.isfinite(value))
    return isinstance(value, (int, float)) and abs(value) < inf
