"""A lease as D holds it: whether D may still read, and whether its reads are valid."""

from __future__ import annotations

import threading
from collections import OrderedDict
from enum import Enum

from kvconnect.errors import UsageError
from kvconnect.trace import count
from kvconnect.transfer.leases.timer import MAX_DRIFT, Clock, lease_clock

_REMEMBERED = 16


class Outcome(Enum):
    """The validity of the bytes read under a lease."""

    OPEN = "open"
    """Not decided yet: reads are under way, or an answer may still come."""
    VALID = "valid"
    INVALID = "invalid"


class HeldLease:
    """A lease as its reader sees it. Thread-safe; nothing blocks.

    The lease is counted on the reader's own clock, less the possible drift of clocks. It begins
    when the reader *sent* the last claim or renewal that P acknowledged. P counts from when that
    message arrived, which is later. So bytes read before the end here were read before P unpinned
    the blocks.

    Reads are valid if

    - the last read had ended before the end, or
    - P answers a release, sent after the last read, that the lease was never broken.

    All other reads are invalid. A decision is final. The transport, not the lease, fails a read
    from a process that has ended, also if another process took its place.

    A reader that needs its bytes earlier may use those read before `confirmed`: P acknowledged a
    message that was sent after them, so the lease was not broken then, nor its blocks reused.

    Args:
        request: the name of the request at P.
        clock: see `lease_clock`.

    Attributes:
        epoch: the lease's epoch; ``None`` until it is known.
        lease_s: the length of the last grant in seconds; 0 before the first.
        confirmed: the time on the lease's clock when the last acknowledged claim or renewal was
            sent.
        outcome: the validity of the bytes read; ``OPEN`` until it is decided.
        end: the end of the lease, on its clock; in the past before the first grant.
        lost: the reason why P ended the lease or computes no more; ``None`` if P did neither.
        release_seq: the number of the release of `release_sent`; ``None`` before.
    """

    def __init__(
        self, request: str, epoch: int | None = None, *, clock: Clock = lease_clock
    ) -> None:
        self.request = request
        self.epoch = epoch
        self.lease_s = 0.0
        self.confirmed = float("-inf")
        self._clock = clock
        self._lock = threading.Lock()
        self._sent: OrderedDict[int, float] = OrderedDict()
        self._last_sent = float("-inf")
        self.end = float("-inf")
        self._read_end: float | None = None
        self.release_seq: int | None = None
        self.lost: str | None = None
        self.outcome = Outcome.OPEN

    def __repr__(self) -> str:
        return f"HeldLease({self.request!r}, epoch={self.epoch}, {self.outcome.value})"

    @property
    def has_read(self) -> bool:
        """Returns whether the last read has ended."""
        return self._read_end is not None

    @property
    def released(self) -> bool:
        """Returns whether the last read has ended and a release was sent."""
        return self.release_seq is not None

    @property
    def awaits_answer(self) -> bool:
        """Returns whether the last claim or renewal is not acknowledged yet."""
        return self._last_sent > self.confirmed

    def now(self) -> float:
        """Returns the time on the lease's clock."""
        return self._clock()

    def may_read(self) -> bool:
        """Returns whether a read may begin now: the lease is granted, not over and not decided."""
        return self.outcome is Outcome.OPEN and not self.released and self._clock() < self.end

    def renewal_due(self) -> float | None:
        """Returns when the next renewal is due, on the lease's clock; ``None`` if never.

        A renewal is due a third of a lease after the last one. It is due at once if a grant took
        that long to arrive.
        """
        if self.outcome is not Outcome.OPEN or self.released or not self.lease_s:
            return None
        return self._last_sent + self.lease_s / 3

    def sent(self, seq: int) -> None:
        """Records the time of a claim or renewal with number `seq`. Call it before sending."""
        with self._lock:
            self._last_sent = self._sent[seq] = self._clock()
            if len(self._sent) > _REMEMBERED:
                self._sent.popitem(last=False)

    def granted(self, seq: int, lease_s: float) -> bool:
        """Records that P acknowledged the claim or renewal `seq` with a lease of `lease_s` seconds.

        A late grant counts, too, from when the acknowledged message was sent. It may decide that
        reads which ended meanwhile were in time.

        Returns:
            False, and nothing changes, if `seq` is none of the last claims and renewals sent.
        """
        with self._lock:
            at = self._sent.get(seq)
            if at is None:
                return False
            self.confirmed = max(self.confirmed, at)
            self.end = max(self.end, at + lease_s * (1 - MAX_DRIFT))
            self.lease_s = lease_s
            self._decide()
        return True

    def reads_ended(self) -> None:
        """Records that the last read has ended and all its bytes are here. No other read begins.

        Raises:
            UsageError: the end was recorded before.
        """
        now = self._clock()
        with self._lock:
            if self._read_end is not None:
                raise UsageError(f"{self!r}: its reads have ended before")
            self._read_end = now
            self._decide()

    def release_sent(self, seq: int) -> None:
        """Records that a release with number `seq` is about to be sent.

        Raises:
            UsageError: the last read has not ended: call `reads_ended` first, or `give_up`.
        """
        with self._lock:
            if self._read_end is None:
                raise UsageError(f"{self!r}: is released before its reads have ended")
            self.release_seq = seq

    def released_ok(self, seq: int) -> None:
        """Records P's answer to the release `seq` that the lease was never broken."""
        with self._lock:
            if self.release_seq == seq and self.outcome is Outcome.OPEN:
                self.outcome = Outcome.VALID

    def refused(self, seq: int, why: str) -> None:
        """Records P's answer to message `seq` that the lease is expired or unknown.

        Bytes that were valid before stay valid.
        """
        with self._lock:
            if seq not in self._sent and seq != self.release_seq:
                return
            self.lost = self.lost or why
            self._fail()

    def withdrawn(self, why: str) -> None:
        """Records that P computes no more of the request; granted blocks stay."""
        with self._lock:
            self.lost = self.lost or why

    def give_up(self) -> None:
        """Decides an undecided lease as invalid: the reader aborts or no longer waits."""
        with self._lock:
            self._fail()

    def _decide(self) -> None:
        in_time = self._read_end is not None and self._read_end < self.end
        if in_time and self.outcome is Outcome.OPEN:
            self.outcome = Outcome.VALID

    def _fail(self) -> None:
        if self.outcome is not Outcome.OPEN:
            return
        self.outcome = Outcome.INVALID
        if self._read_end is not None:
            count("transfer.late_reads")
