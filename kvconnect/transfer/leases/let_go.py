"""The readers that waited for a request's blocks and stopped waiting."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["LetGo"]

_MAX_READERS = 4096
_MAX_OF_ONE = 64


class LetGo:
    """The holders that stopped waiting, by request, each with its number of readers.

    Bounded, since any peer chooses the names: 64 holders of a request, 4,096 in all. Beyond that,
    the request that was added longest ago is dropped.
    """

    def __init__(self) -> None:
        self._requests: OrderedDict[str, dict[str, int]] = OrderedDict()
        self._total = 0

    def __len__(self) -> int:
        """Returns the number of holders of all requests."""
        return self._total

    def add(self, request: str, holder: str, readers: int) -> None:
        """Records that `holder` stopped waiting for `request`, which has `readers` readers."""
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
        """Removes `holder` from `request`, which it claims again."""
        holders = self._requests.get(request)
        if holders is None or holders.pop(holder, None) is None:
            return
        self._total -= 1
        if not holders:
            del self._requests[request]

    def pop(self, request: str) -> dict[str, int]:
        """Removes `request` and returns the `readers` of each of its holders."""
        holders = self._requests.pop(request, {})
        self._total -= len(holders)
        return holders
