"""The leases of P: which blocks are pinned for peers, and until when."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvconnect.errors import ConfigurationError, OutOfBlocks
from kvconnect.trace import count
from kvconnect.transfer.control.messages import NOTHING_COMPUTED, LeaseId, Watermark
from kvconnect.transfer.leases.lease import Blocks, Ended, Holding, Lease
from kvconnect.transfer.leases.timer import Clock, lease_clock

_REMEMBERED = 4096
_REMEMBERED_HOLDERS = 4 * _REMEMBERED


class Verdict(Enum):
    """The answer of P to a claim, a renewal or a release."""

    OK = "ok"
    EXPIRED = "expired"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Answer:
    """The reply of P to a claim or a renewal. Other fields are set only if `verdict` is ``OK``.

    Attributes:
        lease_s: how long the blocks stay from now on, in seconds.
        tokens: the number of tokens of the prompt.
    """

    verdict: Verdict
    lease_s: float = 0.0
    epoch: int = 0
    tokens: int = 0
    blocks: Blocks = ()
    mark: Watermark = NOTHING_COMPUTED


class LeaseTable:
    """The requests whose blocks peers may read, and until when. Thread-safe; nothing blocks.

    A lease is broken the moment its time is over, even before the next call of `take_ended`. A
    holder whose lease was broken, or that has released, gets no further grant under that epoch.
    Blocks may be unpinned when `take_ended` returns their lease, never before.

    Args:
        lease_s: seconds of a lease from when it is offered, claimed or renewed.
        max_lease_total: the most bytes of all leases together.
        max_idle_s: no lease lasts longer than this many seconds after its request's last progress,
            so that a reader that renews for ever does not pin memory for ever.
        clock: see `lease_clock`.
        changed: called, without a lock held, when `next_end` may be earlier now; must not block.

    Attributes:
        total_nbytes: the bytes that are pinned, counted as in ``len()``.

    Raises:
        ConfigurationError: a number is not greater than 0.
    """

    def __init__(
        self,
        *,
        max_lease_total: int,
        lease_s: float = 10.0,
        max_idle_s: float = 120.0,
        clock: Clock = lease_clock,
        changed: Callable[[], object] = lambda: None,
    ) -> None:
        for name, value in (
            ("lease_s", lease_s),
            ("max_lease_total", max_lease_total),
            ("max_idle_s", max_idle_s),
        ):
            if not value > 0:
                raise ConfigurationError(f"{name}: {value!r} must be greater than 0")
        self.lease_s = lease_s
        self._max_lease_total = max_lease_total
        self._max_idle_s = max_idle_s
        self._clock = clock
        self._changed = changed
        self._lock = threading.Lock()
        # Random, so that the leases of an earlier incarnation are unknown to this one.
        self._next_epoch = secrets.randbits(62)
        self._live: dict[LeaseId, Lease] = {}
        # By name of the request, the newest last; more than one if it is computed several times.
        self._offers: dict[str, list[LeaseId]] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()  # names of which no lease is left
        self.total_nbytes = 0
        self._done: list[Ended] = []
        self._past: OrderedDict[LeaseId, dict[str, float | Holding]] = OrderedDict()
        self._past_holders = 0

    def __len__(self) -> int:
        """Returns how many leases pin blocks, ended ones included until `take_ended`."""
        with self._lock:
            return len(self._live) + len(self._done)

    # ------------------------------------------------------------------ what P's engine does

    def offer(self, request: str, *, tokens: int, nbytes: int, blocks: Blocks = ()) -> LeaseId:
        """Makes blocks of `request`, which the caller has pinned, claimable for `lease_s`.

        Returns the name of the new lease.

        Raises:
            OutOfBlocks: `max_lease_total` is reached; nothing changed, the caller unpins.
        """
        now = self._clock()
        with self._lock:
            if self.total_nbytes + nbytes > self._max_lease_total:
                count("transfer.lease.no_room")
                raise OutOfBlocks(
                    f"max_lease_total: {self.total_nbytes} of {self._max_lease_total} bytes are "
                    f"leased, {nbytes} more do not fit"
                )
            key = LeaseId(request=request, epoch=self._next_epoch)
            self._next_epoch += 1
            self._live[key] = Lease(key, tokens, blocks, nbytes, now + self.lease_s, now)
            self._offers.setdefault(request, []).append(key)
            self._gone.pop(request, None)
            self.total_nbytes += nbytes
        count("transfer.lease.offered", nbytes=nbytes)
        self._changed()
        return key

    def advance(
        self, key: LeaseId, mark: Watermark, blocks: Sequence[Sequence[int]] = ()
    ) -> list[str] | None:
        """Records that more of the request is computed; keeps it claimable for another `lease_s`.

        Args:
            key: the name of the lease.
            mark: how much is computed; ignored if it is less than the known mark.
            blocks: the ids of further blocks, for each pool group; empty if there is none.

        Returns:
            The holders that may still read; ``None`` if the lease has ended: no peer needs the
            request any more.
        """
        now = self._clock()
        with self._lock:
            lease = self._live.get(key)
            if lease is None or not self._settle(lease, now):
                return None
            lease.mark = max(lease.mark, mark)
            if blocks:
                known = lease.blocks or ((),) * len(blocks)
                lease.blocks = tuple((*old, *new) for old, new in zip(known, blocks, strict=True))
            lease.progress_at = now
            lease.offered_until = max(lease.offered_until, now + self.lease_s)
            return lease.active()

    def withdraw(self, key: LeaseId) -> list[str]:
        """Stops grants and renewals of this lease. Granted blocks stay until their end.

        Returns:
            The holders that may still read, which the caller informs.
        """
        now = self._clock()
        with self._lock:
            lease = self._live.get(key)
            if lease is None:
                return []
            lease.withdrawn = True
            lease.offered_until = now
            lease.readers = 0
            holders = lease.active()
        self._changed()
        return holders

    def is_offered(self, request: str) -> bool | None:
        """Returns whether `request` has a live lease; ``None`` if it had none recently either."""
        now = self._clock()
        with self._lock:
            for key in tuple(self._offers.get(request, ())):
                self._settle(self._live[key], now)
            return True if request in self._offers else False if request in self._gone else None

    def is_claimed(self, key: LeaseId) -> bool:
        """Returns whether a reader has claimed this lease, which lives."""
        with self._lock:
            lease = self._live.get(key)
            return lease is not None and bool(lease.holders)

    def num_blocks(self, key: LeaseId) -> tuple[int, ...]:
        """Returns the number of known blocks by pool group; empty if none, or the lease ended."""
        with self._lock:
            lease = self._live.get(key)
            return () if lease is None else tuple(map(len, lease.blocks))

    def take_ended(self, now: float | None = None) -> list[Ended]:
        """Returns leases that no reader holds at `now`, each exactly once.

        Their memory no longer counts as leased: the caller unpins all their blocks.
        """
        if now is None:
            now = self._clock()
        with self._lock:
            for lease in list(self._live.values()):
                self._settle(lease, now)
            ended, self._done = self._done, []
            self.total_nbytes -= sum(one.nbytes for one in ended)
        for one in ended:
            count(f"transfer.lease.{one.why}", nbytes=one.nbytes)
        return ended

    def next_end(self) -> float | None:
        """Returns when `take_ended` next returns a lease if nothing else happens, on the clock."""
        with self._lock:
            if self._done:
                return self._clock()
            return min(
                (max(lease.ends(), default=0.0) for lease in self._live.values()), default=None
            )

    def last_end(self) -> float | None:
        """Returns the latest time on the clock at which a holder may read; ``None`` without one."""
        with self._lock:
            return max(
                (
                    end
                    for lease in self._live.values()
                    for end in lease.holders.values()
                    if not isinstance(end, Holding)
                ),
                default=None,
            )

    # ------------------------------------------------------------------ what peers ask for

    def claim(
        self, request: str, holder: str, *, epoch: int | None = None, readers: int = 1
    ) -> Answer:
        """Grants `holder` a lease on the blocks of `request`. A repeated claim extends the lease.

        Args:
            request: the name that was passed to `offer`.
            holder: the name of one incarnation of one reader.
            epoch: the epoch of the lease; ``None`` means the newest lease that is not withdrawn.
            readers: the number of readers to wait for, as in `Claim`.
        """
        now = self._clock()
        with self._lock:
            key = self._named(request, epoch, now)
            if key is None:
                return Answer(Verdict.UNKNOWN)
            lease = self._live.get(key)
            if lease is None:
                return Answer(self._of_past(key), epoch=key.epoch)
            if not self._may_grant(lease, holder, now):
                return Answer(Verdict.EXPIRED, epoch=key.epoch)
            lease.readers = max(lease.readers, readers)
            answer = self._grant(lease, holder, now)
        if answer.verdict is Verdict.OK:
            count("transfer.lease.granted")
        return answer

    def renew(self, key: LeaseId, holder: str) -> Answer:
        """Extends the lease of `holder`, which has claimed and still reads."""
        now = self._clock()
        with self._lock:
            lease = self._live.get(key)
            if lease is None:
                return Answer(self._of_past(key), epoch=key.epoch)
            if holder not in lease.holders:
                return Answer(Verdict.UNKNOWN, epoch=key.epoch)
            if not self._may_grant(lease, holder, now):
                return Answer(Verdict.EXPIRED, epoch=key.epoch)
            return self._grant(lease, holder, now)

    def release(self, key: LeaseId, holder: str) -> Verdict:
        """Ends the lease of `holder`; returns ``OK`` only if the lease was never broken."""
        now = self._clock()
        with self._lock:
            lease = self._live.get(key)
            if lease is None:
                end = self._past.get(key, {}).get(holder)
                return Verdict.OK if end is Holding.RELEASED else self._of_past(key)
            if holder not in lease.holders:
                return Verdict.UNKNOWN
            self._settle(lease, now)
            end = lease.holders[holder]
            if not isinstance(end, Holding):
                end = lease.holders[holder] = Holding.RELEASED
                self._settle(lease, now)
        self._changed()
        return Verdict.OK if end is Holding.RELEASED else Verdict.EXPIRED

    def abort(
        self, request: str, holder: str, epoch: int | None = None, *, readers: int = 1
    ) -> None:
        """Ends the lease of `holder`, which discards the bytes that it read.

        A holder that has not claimed counts as one of the readers, too; `readers` is as in `claim`.
        """
        now = self._clock()
        with self._lock:
            key = self._named(request, epoch, now)
            lease = self._live.get(key) if key is not None else None
            if lease is None or not lease.has_room(holder):
                return
            lease.readers = max(lease.readers, readers)
            if not isinstance(lease.holders.get(holder), Holding):
                lease.holders[holder] = Holding.ABORTED
            self._settle(lease, now)
        self._changed()

    # ------------------------------------------------------------------ rules; the lock is held

    def _named(self, request: str, epoch: int | None, now: float) -> LeaseId | None:
        """Returns the lease of `request` that `epoch` names.

        Without an epoch it is the newest that may be claimed, else the newest, else ``None``.
        """
        if epoch is not None:
            return LeaseId(request=request, epoch=epoch)
        keys = tuple(self._offers.get(request, ()))
        for key in reversed(keys):
            lease = self._live[key]
            if self._settle(lease, now) and not lease.withdrawn:
                return key
        return keys[-1] if keys else None

    def _may_grant(self, lease: Lease, holder: str, now: float) -> bool:
        if not self._settle(lease, now) or lease.withdrawn or not lease.has_room(holder):
            return False
        return not isinstance(lease.holders.get(holder), Holding)

    def _grant(self, lease: Lease, holder: str, now: float) -> Answer:
        until = min(now + self.lease_s, lease.progress_at + self._max_idle_s)
        held = lease.holders.get(holder)
        if isinstance(held, float):
            until = max(until, held)
        if until <= now:
            return Answer(Verdict.EXPIRED, epoch=lease.key.epoch)
        lease.holders[holder] = until
        return Answer(
            Verdict.OK, until - now, lease.key.epoch, lease.tokens, lease.blocks, lease.mark
        )

    def _settle(self, lease: Lease, now: float) -> bool:
        """Returns whether a reader of a live lease is left at `now`; ends the lease if not."""
        if lease.settle(now):
            return True
        del self._live[lease.key]
        same = self._offers[lease.key.request]
        same.remove(lease.key)
        if not same:
            del self._offers[lease.key.request]
            self._gone[lease.key.request] = None
            if len(self._gone) > _REMEMBERED:
                self._gone.popitem(last=False)
        self._done.append(lease.ended())
        self._past[lease.key] = lease.holders
        self._past_holders += len(lease.holders)
        while len(self._past) > _REMEMBERED or self._past_holders > _REMEMBERED_HOLDERS:
            _, forgotten = self._past.popitem(last=False)
            self._past_holders -= len(forgotten)
        return False

    def _of_past(self, key: LeaseId) -> Verdict:
        return Verdict.EXPIRED if key in self._past else Verdict.UNKNOWN
