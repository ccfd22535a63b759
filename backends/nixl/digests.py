"""The digests by which a reader sees that it has what the owner holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import xxhash

__all__ = ["digest_of"]


def digest_of(parts: Iterable[Any]) -> int:
    """Returns the xxh3-64 of `parts`, contiguous bytes of one block in their order."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest()
