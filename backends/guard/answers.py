"""Checks of backends' answers: a backend whose answer is malformed counts as unavailable.

`counted` checks numbers of blocks, and checksums protect frames. This module checks the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

import numpy as np

from kvconnect.backend import Child, StoredEntry
from kvconnect.keys import KEY_NBYTES


def are_children(answer: object) -> bool:
    """Returns whether `answer` is a sequence of children, with fields of the right types."""
    return (
        isinstance(answer, Sequence)
        and not isinstance(answer, (str, bytes))
        and all(
            isinstance(one, Child) and _is_key(one.key) and _is_tokens(one.tokens) for one in answer
        )
    )


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
        and (answer.hits is None or isinstance(answer.hits, int))
    )


def are_entries(answer: object, count: int) -> bool:
    """Returns whether `answer` has `count` elements, each of them an entry or ``None``."""
    return (
        isinstance(answer, Sequence)
        and len(answer) == count
        and all(one is None or is_entry(one) for one in answer)
    )


def are_flags(answer: object, count: int) -> bool:
    """Returns whether `answer` has `count` elements, each of them a ``bool``."""
    return (
        isinstance(answer, Sequence)
        and len(answer) == count
        and all(isinstance(one, bool) for one in answer)
    )


def are_numbers(answer: object) -> bool:
    """Returns whether `answer` is a mapping of names to finite numbers."""
    return isinstance(answer, Mapping) and all(
        isinstance(name, str) and _is_number(number) for name, number in answer.items()
    )


def _is_key(value: object) -> bool:
    return isinstance(value, bytes) and len(value) == KEY_NBYTES


def _is_tokens(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu"


def _is_number(value: object) -> bool:
    if isinstance(value, (np.integer, np.floating)):
        return bool(np.isfinite(value))
    return isinstance(value, (int, float)) and abs(value) < inf
