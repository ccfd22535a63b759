"""The prefixes that a server has computed lately."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["HeldPrefixes"]


class HeldPrefixes:
    """A set of prefixes by their chained hashes; the least recently used are forgotten.

    Args:
        limit: how many are remembered at most.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def matched(self, prefixes: Sequence[bytes]) -> int:
        """Returns how many leading ones of `prefixes` are held; changes nothing."""
        for count, prefix in enumerate(prefixes):
            if prefix not in self._held:
                return count
        return len(prefixes)

    def add(self, prefixes: Sequence[bytes]) -> None:
        """Adds `prefixes` that were computed or used."""
        # The longest first: a prompt is forgotten from its end.
        for prefix in reversed(prefixes):
            self._held[prefix] = None
            self._held.move_to_end(prefix)
        while len(self._held) > self._limit:
            self._held.popitem(last=False)

    def clear(self) -> None:
        """Forgets all prefixes."""
        self._held.clear()
