"""The lease messages of P. Each is answered on the thread that it arrives on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvconnect.errors import OutOfBlocks
from kvconnect.trace import count
from kvconnect.transfer.control.endpoint import Connected, Disconnected, Event, Sender
from kvconnect.transfer.control.keyed import ClaimKeys, GrantKeys
from kvconnect.transfer.control.messages import (
    Abort,
    Claim,
    Expired,
    Grant,
    LeaseId,
    Message,
    Release,
    ReleasedOk,
    Renew,
    Renewed,
    RenewedLease,
    Unknown,
    Watermark,
    WatermarkOf,
)
from kvconnect.transfer.leases.lease import Blocks, Ended, LetGo
from kvconnect.transfer.leases.table import Answer, LeaseTable, Verdict
from kvconnect.transfer.leases.timer import Clock, Timer, lease_clock

Send: TypeAlias = Callable[[Message], bool]
"""Sends a message to one holder without blocking; returns False if it cannot be sent."""

_MAX_WAITING = 1024


@dataclass(frozen=True, slots=True)
class _WaitingClaim:
    claim: Claim
    holder: str
    send: Send
    until: float


class LeaseServer:
    """Grants, renews and ends leases, independent of the engine's steps.

    Thread-safe; only `close` blocks. `offer`, `advance` and `withdraw` are for the engine;
    `connected`, `disconnected` and `handle` for the channels. `start` starts a thread that ends
    leases in time.

    Args:
        unpin: receives the leases that ended, each once, or again if it raised. It runs on the
            thread of `reap`, so it passes them to the owner of the blocks. It must not block.
        max_lease_total, lease_s, max_idle_s: as in `LeaseTable`.
        claim_wait_s: how long a claim waits for a request that is not published yet, in seconds.
        clock: see `lease_clock`.

    Attributes:
        table: the leases that pin blocks.
    """

    def __init__(
        self,
        unpin: Callable[[Sequence[Ended]], object],
        *,
        max_lease_total: int,
        lease_s: float = 10.0,
        max_idle_s: float = 120.0,
        claim_wait_s: float = 30.0,
        clock: Clock = lease_clock,
    ) -> None:
        self._unpin = unpin
        self._claim_wait_s = claim_wait_s
        self._clock = clock
        # Held while the table changes and the messages about it are sent, so that holders get the
        # messages in the order of the changes.
        self._lock = threading.Lock()
        self._senders: dict[str, Send] = {}
        self._waiting: dict[tuple[str, str], _WaitingClaim] = {}
        self._let_go = LetGo()
        self._ended: list[Ended] = []
        self._timer: Timer | None = None
        self.table = LeaseTable(
            max_lease_total=max_lease_total,
            lease_s=lease_s,
            max_idle_s=max_idle_s,
            clock=clock,
            changed=self._wake,
        )

    def start(self) -> None:
        """Starts the thread that calls `reap` when it is due. Called once."""
        self._timer = Timer("kvconnect-lease-reaper", self.reap, self._clock)

    def close(self, memory: object = None) -> None:
        """Stops the thread. Blocks while `unpin` runs; the caller unpins the remaining blocks.

        `memory` stays referenced until every granted lease has ended. A holder may have been frozen
        in the middle of a read, and treats bytes as valid that it reads before its lease ends. If
        the holder maps this process's memory, it would read the content of a later use.
        """
        if self._timer is not None:
            self._timer.close()
        until = self.table.last_end()
        left_s = 0.0 if until is None else until - self._clock()
        if memory is not None and left_s > 0:
            keep = threading.Timer(left_s, id, [memory])
            keep.name, keep.daemon = "kvconnect-leased-memory", True
            keep.start()

    # ------------------------------------------------------------------ for the engine

    def offer(self, request: str, *, tokens: int, nbytes: int, blocks: Blocks = ()) -> LeaseId:
        """Calls `LeaseTable.offer`, and answers the claims that wait for `request`.

        A holder that stopped waiting counts as a reader that has aborted. If there is no other
        reader, the lease has ended.
        """
        with self._lock:
            key = self.table.offer(request, tokens=tokens, nbytes=nbytes, blocks=blocks)
            for name in [name for name in self._waiting if name[0] == request]:
                one = self._waiting.pop(name)
                one.send(self._claimed(one.claim, one.holder))
            for holder, readers in self._let_go.pop(request).items():
                self.table.abort(request, holder, key.epoch, readers=readers)
        return key

    def grant_keys(
        self,
        claim: ClaimKeys,
        holder: str,
        send: Send,
        grant: Callable[[int, float], GrantKeys],
        *,
        nbytes: int,
    ) -> LeaseId:
        """Leases blocks, which the caller has pinned, to `holder` and sends it the grant.

        The lease ends as every other: `unpin` receives it, with the returned name.

        Args:
            claim: the message to answer.
            holder: the name of the reader that sent `claim`.
            send: sends to `holder`.
            grant: returns the answer, from the epoch and the seconds of the lease.
            nbytes: the size of the blocks in bytes.

        Raises:
            OutOfBlocks: `max_lease_total` is reached, or this process stood still until the lease
                had ended; nothing was sent, the caller unpins. In the second case `unpin` receives
                the lease, too.
        """
        with self._lock:
            key = self.table.offer(claim.request, tokens=0, nbytes=nbytes)
            answer = self.table.claim(claim.request, holder, epoch=key.epoch)
            if answer.verdict is not Verdict.OK:
                self.table.withdraw(key)
                raise OutOfBlocks(f"{claim.request}: the lease ended before it was granted")
            send(grant(key.epoch, answer.lease_s))
        return key

    def advance(self, key: LeaseId, mark: Watermark, blocks: Blocks = ()) -> bool:
        """Calls `LeaseTable.advance` and sends the holders a `WatermarkOf`.

        Returns False if the lease has ended.
        """
        with self._lock:
            first = self.table.num_blocks(key) or (0,) * len(blocks)
            holders = self.table.advance(key, mark, blocks)
            if holders:
                message = WatermarkOf(
                    request=key.request,
                    epoch=key.epoch,
                    watermark=mark,
                    first=first if blocks else (),
                    blocks=blocks,
                )
                self._send_to(holders, message)
        return holders is not None

    def withdraw(self, key: LeaseId, reason: str = "") -> None:
        """Calls `LeaseTable.withdraw` and sends the holders an `Abort`."""
        with self._lock:
            holders = self.table.withdraw(key)
            message = Abort(request=key.request, epoch=key.epoch, reason=reason[:1024])
            self._send_to(holders, message)

    def _send_to(self, holders: Sequence[str], message: Message) -> None:
        for holder in holders:
            send = self._senders.get(holder)
            if send is not None:
                send(message)

    # ------------------------------------------------------------------ for the channels

    def connected(self, holder: str, send: Send) -> None:
        """Stores `send` as the way to `holder`; replaces an earlier one."""
        with self._lock:
            self._senders[holder] = send

    def disconnected(self, holder: str, send: Send) -> None:
        """Removes `send` and the claims that wait for an answer through `send`.

        The leases of `holder` continue until they expire; `holder` may connect again before.
        """
        with self._lock:
            if self._senders.get(holder) == send:
                del self._senders[holder]
            for name in [name for name, one in self._waiting.items() if one.send == send]:
                del self._waiting[name]

    def deliver(self, channel: Sender, event: Event) -> None:
        """Passes an event of a holder's channel to `connected`, `disconnected` or `handle`."""
        holder, send = channel.peer.holder, channel.send
        if isinstance(event, Connected):
            self.connected(holder, send)
        elif isinstance(event, Disconnected):
            self.disconnected(holder, send)
        else:
            self.handle(event, holder, send)

    def handle(self, message: Message, holder: str, send: Send) -> None:
        """Answers `message` of `holder` through `send`, if it is about leases.

        A message over a connection that another one has replaced is late and ignored: the holder
        has claimed again over the other connection, and reads.
        """
        with self._lock:
            if self._senders.get(holder, send) != send:
                count("transfer.lease.late_messages")
            elif isinstance(message, Claim):
                self._claim(message, holder, send)
            elif isinstance(message, Renew):
                send(self._renewed(message, holder))
            elif isinstance(message, Release):
                send(self._released(message, holder))
            elif isinstance(message, Abort):
                if waited := self._waiting.pop((message.request, holder), None):
                    self._let_go.add(message.request, holder, waited.claim.readers)
                self.table.abort(message.request, holder, message.epoch)

    def _claim(self, claim: Claim, holder: str, send: Send) -> None:
        self._let_go.discard(claim.request, holder)
        answer = self._claimed(claim, holder)
        name = (claim.request, holder)
        if isinstance(answer, Unknown) and claim.epoch is None:
            if name in self._waiting or len(self._waiting) < _MAX_WAITING:
                until = self._clock() + self._claim_wait_s
                self._waiting[name] = _WaitingClaim(claim, holder, send, until)
                self._wake()
                return
            count("transfer.lease.claims_refused")
        send(answer)

    def _claimed(self, claim: Claim, holder: str) -> Message:
        answer = self.table.claim(claim.request, holder, epoch=claim.epoch, readers=claim.readers)
        if answer.verdict is Verdict.UNKNOWN:
            return Unknown(seq=claim.seq, request=claim.request, epoch=claim.epoch)
        if answer.verdict is Verdict.EXPIRED:
            return Expired(seq=claim.seq, request=claim.request, epoch=answer.epoch)
        return Grant(
            seq=claim.seq,
            request=claim.request,
            epoch=answer.epoch,
            lease_s=answer.lease_s,
            tokens=answer.tokens,
            blocks=answer.blocks,
            watermark=answer.mark,
        )

    def _renewed(self, renew: Renew, holder: str) -> Renewed:
        answers: list[tuple[LeaseId, Answer]] = [
            (lease, self.table.renew(lease, holder)) for lease in renew.leases
        ]
        return Renewed(
            seq=renew.seq,
            leases=tuple(
                RenewedLease(
                    request=lease.request,
                    epoch=lease.epoch,
                    lease_s=answer.lease_s,
                    watermark=answer.mark,
                )
                for lease, answer in answers
                if answer.verdict is Verdict.OK
            ),
            expired=tuple(lease for lease, one in answers if one.verdict is Verdict.EXPIRED),
            unknown=tuple(lease for lease, one in answers if one.verdict is Verdict.UNKNOWN),
        )

    def _released(self, release: Release, holder: str) -> Message:
        verdict = self.table.release(LeaseId(request=release.request, epoch=release.epoch), holder)
        cls: type[ReleasedOk | Expired | Unknown] = Unknown
        if verdict is not Verdict.UNKNOWN:
            cls = ReleasedOk if verdict is Verdict.OK else Expired
        return cls(seq=release.seq, request=release.request, epoch=release.epoch)

    # ------------------------------------------------------------------ the timer

    def _wake(self) -> None:
        if self._timer is not None:
            self._timer.wake()

    def reap(self) -> float | None:
        """Passes leases that ended to `unpin`, and answers claims that waited too long.

        Only one thread at a time may call this.

        Returns:
            The time on the clock when `reap` is due next; ``None`` if nothing is due.
        """
        now = self._clock()
        with self._lock:
            self._ended += self.table.take_ended(now)
            for name in [name for name, one in self._waiting.items() if one.until <= now]:
                one = self._waiting.pop(name)
                self._let_go.add(one.claim.request, one.holder, one.claim.readers)
                one.send(Unknown(seq=one.claim.seq, request=one.claim.request))
            due = [one.until for one in self._waiting.values()]
            end = self.table.next_end()
        if self._ended:
            self._unpin(tuple(self._ended))
            self._ended.clear()
        return min(due if end is None else [end, *due], default=None)
