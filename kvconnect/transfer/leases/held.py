"""D's side of a lease: may it still read, and is what it read valid?"""

from __future__ import annotations

import threading
from collections import OrderedDict
from enum import Enum

from kvconnect.errors import UsageError
from kvconnect.trace import count
from kvconnect.transfer.leases.clock import MAX_DRIFT, Clock, lease_clock

__all__ = ["HeldLease", "Outcome"]

_REMEMBERED = 16


class Outcome(Enum):
    """Of what was read under a lease."""

    OPEN = "open"
    """Not decided yet: reads go on, or an answer may still come."""
    VALID = "valid"
    INVALID = "invalid"


class HeldLease:
    """A lease as its reader sees it. Thread-safe; nothing blocks.

    It is counted from when the reader *sent* the last claim or renewal that P acknowledged, on the
    reader's own clock, less what clocks may drift. P counts from when that arrived, which is later;
    so what was read before the end here was read before P let go of it. What was read is valid if

    - the last read had ended before the end, or
    - P says, to a `released` that followed the last read, that the lease was never broken.

    Anything else is invalid. A decision is final. That a read fails once the process that it reads
    from has ended, also if another took its place, is the transport's part.

    Args:
        request: as P calls it.
        clock: see `lease_clock`.

    Attributes:
        epoch: ``None`` until it is known.
        lease_s: of the last grant, in seconds; 0 before the first.
    """

    def __init__(
        self, request: str, epoch: int | None = None, *, clock: Clock = lease_clock
    ) -> None:
        self.request = request
        self.epoch = epoch
        self.lease_s = 0.0
        self._clock = clock
        self._lock = threading.Lock()
        self._sent: OrderedDict[int, float] = OrderedDict()
        self._last_sent = float("-inf")
        self._end = float("-inf")
        self._read_end: float | None = None
        self._release_seq: int | None = None
        self._lost: str | None = None
        self._outcome = Outcome.OPEN

    def __repr__(self) -> str:
        return f"HeldLease({self.request!r}, epoch={self.epoch}, {self._outcome.value})"

    @property
    def outcome(self) -> Outcome:
        """Whether what was read is valid, as far as it is decided."""
        return self._outcome

    @property
    def end(self) -> float:
        """Until when it is held, on its clock; before the first grant it is past."""
        return self._end

    @property
    def lost(self) -> str | None:
        """Why P does not honour it, or computes no more of it; ``None``: it does."""
        return self._lost

    @property
    def has_read(self) -> bool:
        """Whether the last read has ended."""
        return self._read_end is not None

    @property
    def released(self) -> bool:
        """Whether the last read has ended and P is told."""
        return self._release_seq is not None

    @property
    def release_seq(self) -> int | None:
        """The number of `release_sent`."""
        return self._release_seq

    def may_read(self) -> bool:
        """Whether a read may begin now: granted, not over, not decided."""
        return self._outcome is Outcome.OPEN and not self.released and self._clock() < self._end

    def renewal_due(self) -> float | None:
        """When the next renewal should be sent, on its clock; ``None``: never.

        A third of a lease after the last one, and at once when a grant took that long to come.
        """
        if self._outcome is not Outcome.OPEN or self.released or not self.lease_s:
            return None
        return self._last_sent + self.lease_s / 3

    def sent(self, seq: int) -> None:
        """A claim or renewal with this number is about to be sent: call it before that."""
        with self._lock:
            self._last_sent = self._sent[seq] = self._clock()
            if len(self._sent) > _REMEMBERED:
                self._sent.popitem(last=False)

    def granted(self, seq: int, lease_s: float) -> bool:
        """P acknowledged the claim or renewal `seq` with a lease of so many seconds.

        One that comes late counts, too, from when what it acknowledges was sent: it may decide that
        reads which ended meanwhile were in time.

        Returns:
            False, and nothing changes, if none of that number was sent of late.
        """
        with self._lock:
            at = self._sent.get(seq)
            if at is None:
                return False
            self._end = max(self._end, at + lease_s * (1 - MAX_DRIFT))
            self.lease_s = lease_s
            self._decide()
        return True

    def reads_ended(self) -> None:
        """The last read has ended, with all its bytes here; no other begins.

        Raises:
            UsageError: that was said before.
        """
        now = self._clock()
        with self._lock:
            if self._read_end is not None:
                raise UsageError(f"{self!r}: its reads have ended before")
            self._read_end = now
            self._decide()

    def release_sent(self, seq: int) -> None:
        """P is about to be told, with this number, that the last read has ended.

        Raises:
            UsageError: it has not: call `reads_ended` first, or `give_up`.
        """
        with self._lock:
            if self._read_end is None:
                raise UsageError(f"{self!r}: is released before its reads have ended")
            self._release_seq = seq

    def released_ok(self, seq: int) -> None:
        """P says to the release `seq` that the lease was never broken."""
        with self._lock:
            if self._release_seq == seq and self._outcome is Outcome.OPEN:
                self._outcome = Outcome.VALID

    def refused(self, seq: int, why: str) -> None:
        """P says to `seq`, of whatever kind, that the lease is expired or unknown.

        What was valid before stays so.
        """
        with self._lock:
            if seq not in self._sent and seq != self._release_seq:
                return
            self._lost = self._lost or why
            self._fail()

    def withdrawn(self, why: str) -> None:
        """P computes no more of the request; what it granted, it keeps."""
        with self._lock:
            self._lost = self._lost or why

    def give_up(self) -> None:
        """Nothing that is not valid yet becomes so: the reader aborts, or waits no longer."""
        with self._lock:
            self._fail()

    def _decide(self) -> None:
        in_time = self._read_end is not None and self._read_end < self._end
        if in_time and self._outcome is Outcome.OPEN:
            self._outcome = Outcome.VALID

    def _fail(self) -> None:
        if self._outcome is not Outcome.OPEN:
            return
        self._outcome = Outcome.INVALID
        if self._read_end is not None:
            count("transfer.late_reads")
