"""Checks of backends' answers: a backend whose answer is malformed counts as unavailable.

`counted` checks numbers of blocks, and checksums protect frames. This module checks the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Never

import numpy as np

from kvconnect.backend import Child, StoredEntry
from kvconnect.errors import BackendUnavailable
from kvconnect.keys import KEY_NBYTES


def checked_children(answer: object, name: str) -> Sequence[Child]:
    """Returns `answer`, which `children` of a backend gave, after a check of its types.

    Raises:
        BackendUnavailable: `answer` is no sequence of children.
    """
    if not isinstance(answer, Sequence) or isinstance(answer, (str, bytes)):
        _refuse(answer, name, "children")
    for child in answer:
        if not isinstance(child, Child) or not _is_key(child.key) or not _is_tokens(child.tokens):
            _refuse(child, name, "children")
    return answer


def checked_entry(answer: object, name: str, operation: str = "scan") -> StoredEntry:
    """Returns `answer`, a step of a backend's `scan`, after a check of its fields' types.

    Raises:
        BackendUnavailable: `answer` is no entry, or one of its fields has a wrong type.
    """
    if not isinstance(answer, StoredEntry):
        _refuse(answer, name, operation)
    whole = (answer.nbytes, answer.priority, answer.group)
    if not (
        _is_key(answer.key)
        and (answer.parent is None or _is_key(answer.parent))
        and all(isinstance(number, int) for number in whole)
        and _is_number(answer.created_at)
        and _is_number(answer.used_at)
        and (answer.tokens is None or _is_tokens(answer.tokens))
        and all(_is_bytes(value) for value in (answer.namespace, answer.model))
        and (answer.pinned_until == inf or _is_number(answer.pinned_until))
        and (answer.hits is None or isinstance(answer.hits, int))
    ):
        _refuse(answer, name, operation)
    return answer


def checked_entries(answer: object, count: int, name: str) -> Sequence[StoredEntry | None]:
    """Returns `answer`, which `describe` of a backend gave for `count` keys, after a check.

    Raises:
        BackendUnavailable: `answer` has another length, or an element is not an entry or ``None``.
    """
    if not isinstance(answer, Sequence) or len(answer) != count:
        _refuse(answer, name, f"describe of {count} blocks")
    for entry in answer:
        if entry is not None:
            checked_entry(entry, name, "describe")
    return answer


def checked_pins(answer: object, count: int, name: str) -> Sequence[bool]:
    """Returns `answer`, which `pin` of a backend gave for `count` keys, after a check.

    Raises:
        BackendUnavailable: `answer` has another length, or an element is not a ``bool``.
    """
    if (
        not isinstance(answer, Sequence)
        or len(answer) != count
        or not all(isinstance(one, bool) for one in answer)
    ):
        _refuse(answer, name, f"pin of {count} blocks")
    return answer


def checked_numbers(answer: object, name: str) -> Mapping[str, float]:
    """Returns `answer`, which `stats` of a backend gave, after a check of its types.

    Raises:
        BackendUnavailable: `answer` is no mapping of names to finite numbers.
    """
    if not isinstance(answer, Mapping):
        _refuse(answer, name, "stats")
    for key, number in answer.items():
        if not isinstance(key, str) or not _is_number(number):
            _refuse({key: number}, name, "stats")
    return answer


def _is_key(value: object) -> bool:
    return isinstance(value, bytes) and len(value) == KEY_NBYTES


def _is_tokens(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu"


def _is_number(value: object) -> bool:
    if isinstance(value, (np.integer, np.floating)):
        return bool(np.isfinite(value))
    return isinstance(value, (int, float)) and abs(value) < float("inf")


def _is_bytes(value: object) -> bool:
    return isinstance(value, bytes)


def _refuse(answer: object, name: str, operation: str) -> Never:
    raise BackendUnavailable(f"{name}: {operation} answered {answer!r:.200}")
