"""A lease of P: which blocks it pins, who holds it, until when, and who no longer waits for one."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, TypeAlias

from kvconnect.transfer.control.messages import NOTHING_COMPUTED, LeaseId, Watermark

_MAX_HOLDERS = 256  # for one lease: as many peers as are connected at once

Blocks: TypeAlias = tuple[tuple[int, ...], ...]
"""Block ids of a request in its order, for each pool group."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The record of a lease that no reader holds any more. Its blocks can be unpinned."""

    key: LeaseId
    nbytes: int
    why: Literal["released", "aborted", "expired"]


class Holding(Enum):
    """The way in which a holder's part of a lease ended."""

    RELEASED = "released"
    ABORTED = "aborted"
    BROKEN = "broken"


@dataclass(slots=True)
class Lease:
    """A lease. `LeaseTable` changes it with its lock held.

    Attributes:
        key: the name of the lease.
        tokens: the number of tokens of the prompt.
        blocks: the ids of the blocks that are known so far.
        nbytes: the size of all blocks in bytes.
        offered_until: the time until which readers that have not claimed may still claim.
        progress_at: when more of the request was last computed.
        mark: how much of the request is computed.
        readers: the number of readers that are expected.
        withdrawn: whether P refuses all further grants and renewals.
        holders: for each holder that claimed, when its lease ends, or how it ended.
    """

    key: LeaseId
    tokens: int
    blocks: Blocks
    nbytes: int
    offered_until: float
    progress_at: float
    mark: Watermark = NOTHING_COMPUTED
    readers: int = 1
    withdrawn: bool = False
    holders: dict[str, float | Holding] = field(default_factory=dict)

    def active(self) -> list[str]:
        """Returns the holders that may still read."""
        return [one for one, end in self.holders.items() if not isinstance(end, Holding)]

    def ends(self) -> list[float]:
        """Returns the ends of the lease, one for each reader that may still read."""
        ends = [end for end in self.holders.values() if not isinstance(end, Holding)]
        if len(self.holders) < self.readers:
            ends.append(self.offered_until)
        return ends

    def has_room(self, holder: str) -> bool:
        """Returns whether `holder` can be added. The limit bounds peers that invent new names."""
        return holder in self.holders or len(self.holders) < _MAX_HOLDERS

    def settle(self, now: float) -> bool:
        """Marks holders whose time is over at `now` as broken; returns whether a reader is left."""
        for holder, end in self.holders.items():
            if not isinstance(end, Holding) and end <= now:
                self.holders[holder] = Holding.BROKEN
        return any(end > now for end in self.ends())

    def ended(self) -> Ended:
        """Returns the record of this lease, which no reader holds any more."""
        ways = set(self.holders.values())
        why: Literal["released", "aborted", "expired"] = "expired"
        if len(self.holders) >= self.readers and Holding.BROKEN not in ways:
            why = "released" if Holding.RELEASED in ways else "aborted"
        return Ended(self.key, self.nbytes, why)


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
