"""Readers that waited for an offer and wait no more."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["LetGo"]

_MAX_READERS = 4096
_MAX_OF_ONE = 64


class LetGo:
    """By name of a request: who let go of it, and how many readers each says that it has.

    Bounded, as names are any peer's: 64 for one request; 4,096 in all, beyond which the request
    that came up longest ago is forgotten.
    """

    def __init__(self) -> None:
        self._requests: OrderedDict[str, dict[str, int]] = OrderedDict()
        self._total = 0

    def __len__(self) -> int:
        """How many readers, those of all requests."""
        return self._total

    def add(self, request: str, holder: str, readers: int) -> None:
        """`holder` let go of `request`, which has so many `readers`."""
        holders = self._requests.setdefault(request, {})
        if holder not in holders:
            if len(holders) >= _MAX_OF_ONE:
                return
            self._total += 1
        holders[holder] = readers
        while self._total > _MAX_READERS:
            _, forgotten = self._requests.popitem(last=False)
            self._total -= len(forgotten)

    def discard(self, request: str, holder: str) -> None:
        """`holder` claims `request` again."""
        holders = self._requests.get(request)
        if holders is None or holders.pop(holder, None) is None:
            return
        self._total -= 1
        if not holders:
            del self._requests[request]

    def pop(self, request: str) -> dict[str, int]:
        """Who let go of `request`, each with the number that it gave; forgotten from now on."""
        holders = self._requests.pop(request, {})
        self._total -= len(holders)
        return holders
