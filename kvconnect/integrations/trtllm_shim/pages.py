"""The function ``valid_page_slots``, which finds the block ids of a list that name a block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

__all__ = ["valid_page_slots"]


def valid_page_slots(page_indices: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yields number and id of each block in a list of ids; -1 stands where there is none."""
    return ((number, slot) for number, slot in enumerate(page_indices) if slot >= 0)
