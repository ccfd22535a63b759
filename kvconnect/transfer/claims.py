"""The reader's (D's) side of leases: claims, renewals in time, releases."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

from kvconnect.errors import DuplicateRequest
from kvconnect.transfer.claimed import Claimed
from kvconnect.transfer.control.endpoint import Connected, Disconnected, Event, Sender
from kvconnect.transfer.control.fields import MAX_ENTRIES
from kvconnect.transfer.control.keyed import ClaimKeys, GrantKeys, Verify
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
    Unknown,
    WatermarkOf,
)
from kvconnect.transfer.leases.held import HeldLease, Outcome
from kvconnect.transfer.leases.server import Send
from kvconnect.transfer.leases.timer import Clock, Timer, lease_clock

_OF_ONE_CLAIM = (Grant, GrantKeys, Expired, Unknown, ReleasedOk, WatermarkOf, Abort)


class LeaseClient:
    """The leases that this process holds on blocks of its peers. Thread-safe; nothing blocks.

    `claim`, `release` and `abort` are for the engine; `deliver` is for the channels. `start` starts
    a thread that renews in time.

    After a connection is lost, each lease lasts until the end that was granted. When the peer is
    connected again, open leases are claimed again, and unanswered releases are sent again.

    Args:
        clock: see `lease_clock`.
    """

    def __init__(self, *, clock: Clock = lease_clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._senders: dict[str, Send] = {}
        self._claimed: dict[tuple[str, str], Claimed] = {}
        self._timer: Timer | None = None

    def __len__(self) -> int:
        """Returns how many claims are open: neither decided nor aborted."""
        return len(self._claimed)

    def start(self) -> None:
        """Starts the thread that calls `renew` when a renewal is due. Called once."""
        self._timer = Timer("kvconnect-lease-renewer", self.renew, self._clock)

    def close(self) -> None:
        """Stops the renewals, so that leases expire. Blocks for a moment."""
        if self._timer is not None:
            self._timer.close()

    # ------------------------------------------------------------------ for the engine

    def claim(
        self,
        peer: str,
        request: str,
        *,
        readers: int = 1,
        keys: Sequence[bytes] = (),
        verify: Verify = "none",
    ) -> Claimed:
        """Asks `peer` for the blocks of `request`, at once or when the peer is connected.

        Args:
            peer: the address of the peer.
            request: the name of the request at the peer; with `keys`, a name that no other claim of
                any process has.
            readers: the number of readers that claim `request`, on all ranks together.
            keys: asks for the leading blocks of these keys, at most `MAX_KEYS`, that the peer has.
            verify: which of the blocks' digests are requested, with `keys`.

        Returns:
            The claim, without blocks until the peer grants it.

        Raises:
            DuplicateRequest: `request` is claimed already, and not yet decided.
        """
        lease = HeldLease(request, clock=self._clock)
        claimed = Claimed(peer, lease, readers, keys=tuple(keys), verify=verify)
        with self._lock:
            if (peer, request) in self._claimed:
                raise DuplicateRequest(f"request '{request}' of peer '{peer}' is claimed already")
            self._claimed[peer, request] = claimed
            self._send_claim(claimed)
        return claimed

    def release(self, claimed: Claimed) -> Outcome:
        """Records that the last read has ended, unless that is recorded, and sends a release.

        Returns:
            The outcome. If it is ``OPEN``, the claim's listener is called once it is decided. A
            caller that no longer waits calls `abort`.
        """
        if not claimed.lease.has_read or claimed.lease.released:
            claimed.lease.reads_ended()
        with self._lock:
            claimed.lease.release_sent(next(self._numbers))
            self._send_release(claimed)
            self._forget_if_decided(claimed)
        return claimed.lease.outcome

    def confirm(self, claimed: Claimed) -> None:
        """Renews the lease of `claimed` at once, unless an answer is awaited already.

        The answer moves `HeldLease.confirmed`, and calls the claim's listener.
        """
        with self._lock:
            lease = claimed.lease
            if lease.outcome is Outcome.OPEN and not (lease.released or lease.awaits_answer):
                self._send_renew(claimed.peer, [claimed])

    def abort(self, claimed: Claimed, reason: str = "") -> Outcome:
        """Ends the claim and sends an abort, so that the peer unpins its blocks.

        Bytes that are not valid yet never become valid. The peer's blocks may change from now on,
        and a read that still runs may return anything. Works in any state, also twice.

        Returns:
            The outcome.
        """
        with self._lock:
            claimed.lease.give_up()
            if self._claimed.get((claimed.peer, claimed.lease.request)) is claimed:
                del self._claimed[claimed.peer, claimed.lease.request]
                message = Abort(
                    request=claimed.lease.request,
                    epoch=claimed.lease.epoch,
                    reason=reason[:1024],
                )
                self._send(claimed.peer, message)
        return claimed.lease.outcome

    # ------------------------------------------------------------------ for the channels

    def connected(self, peer: str, send: Send) -> None:
        """Stores `send` as the way to `peer`, and sends the open claims and releases again."""
        with self._lock:
            self._senders[peer] = send
            for claimed in self._of(peer):
                if claimed.lease.released:
                    self._send_release(claimed)
                else:
                    self._send_claim(claimed)

    def disconnected(self, peer: str, send: Send, reason: str = "") -> None:
        """Forgets `send`, which no longer reaches `peer`.

        The claims on the peer stay. Each gets a `reason`, for callers that do not wait for the next
        connection.
        """
        with self._lock:
            if self._senders.get(peer) == send:
                del self._senders[peer]
            concerned = self._of(peer)
            for claimed in concerned:
                claimed.reason = claimed.reason or f"the connection to {peer} was lost: {reason}"
        _notify(concerned)

    def deliver(self, peer: str, channel: Sender, event: Event) -> None:
        """Passes an event of the channel to `connected`, `disconnected` or `handle`."""
        if isinstance(event, Connected):
            self.connected(peer, channel.send)
        elif isinstance(event, Disconnected):
            self.disconnected(peer, channel.send, event.reason)
        else:
            self.handle(event, peer)

    def handle(self, message: Message, peer: str) -> None:
        """Updates the claim that a message of `peer` is about, and calls the claim's listener."""
        changed: list[Claimed] = []
        with self._lock:
            if isinstance(message, Renewed):
                changed = self._renewed(message, peer)
            elif isinstance(message, _OF_ONE_CLAIM):
                claimed = self._claimed.get((peer, message.request))
                if claimed is not None and self._is_of(claimed, message.epoch):
                    self._take(claimed, message)
                    changed = [claimed]
            for claimed in changed:
                self._forget_if_decided(claimed)
        _notify(changed)
        if changed and self._timer is not None:
            self._timer.wake()

    def renew(self) -> float | None:
        """Sends the renewals that are due, one message for the leases of a peer.

        Returns:
            The time on the clock when the next renewal is due; ``None`` if no lease needs one.
        """
        now = self._clock()
        with self._lock:
            # Renewals due soon are sent, too: one message for each peer and third of a lease.
            soon: dict[str, list[Claimed]] = {}
            due_peers = set()
            for claimed in self._claimed.values():
                due = claimed.lease.renewal_due()
                if due is None:
                    continue
                if due <= now:
                    due_peers.add(claimed.peer)
                if due <= now + claimed.lease.lease_s / 6:
                    soon.setdefault(claimed.peer, []).append(claimed)
            for peer in due_peers:
                for start in range(0, len(soon[peer]), MAX_ENTRIES):
                    self._send_renew(peer, soon[peer][start : start + MAX_ENTRIES])
            dues = (claimed.lease.renewal_due() for claimed in self._claimed.values())
            return min((due for due in dues if due is not None), default=None)

    # ------------------------------------------------------------------ the lock is held

    def _of(self, peer: str) -> list[Claimed]:
        return [claimed for claimed in self._claimed.values() if claimed.peer == peer]

    @staticmethod
    def _is_of(claimed: Claimed, epoch: int | None) -> bool:
        known = claimed.lease.epoch
        return known is None or epoch is None or known == epoch

    def _send(self, peer: str, message: Message) -> bool:
        send = self._senders.get(peer)
        return send is not None and send(message)

    def _send_claim(self, claimed: Claimed) -> None:
        lease, request, keys = claimed.lease, claimed.lease.request, claimed.keys
        if keys and lease.epoch is not None:  # another claim would be another lease
            self._send_renew(claimed.peer, [claimed])
            return
        seq = next(self._numbers)
        lease.sent(seq)
        message: Message
        if keys:
            message = ClaimKeys(seq=seq, request=request, keys=keys, verify=claimed.verify)
        else:
            message = Claim(seq=seq, request=request, epoch=lease.epoch, readers=claimed.readers)
        self._send(claimed.peer, message)

    def _send_renew(self, peer: str, several: list[Claimed]) -> None:
        seq = next(self._numbers)
        leases = []
        for claimed in several:
            if claimed.lease.epoch is not None:
                claimed.lease.sent(seq)
                leases.append(LeaseId(request=claimed.lease.request, epoch=claimed.lease.epoch))
        self._send(peer, Renew(seq=seq, leases=tuple(leases)))

    def _send_release(self, claimed: Claimed) -> None:
        lease = claimed.lease
        if lease.epoch is None or lease.release_seq is None:
            return
        message = Release(seq=lease.release_seq, request=lease.request, epoch=lease.epoch)
        self._send(claimed.peer, message)

    def _forget_if_decided(self, claimed: Claimed) -> None:
        name = (claimed.peer, claimed.lease.request)
        if claimed.lease.outcome is not Outcome.OPEN and self._claimed.get(name) is claimed:
            del self._claimed[name]

    def _take(
        self,
        claimed: Claimed,
        message: Grant | GrantKeys | Expired | Unknown | ReleasedOk | WatermarkOf | Abort,
    ) -> None:
        lease = claimed.lease
        if isinstance(message, GrantKeys):
            fits = claimed.keys and len(message.sizes) <= len(claimed.keys)
            if fits and lease.granted(message.seq, message.lease_s):
                lease.epoch = message.epoch
                claimed.granted = message
        elif isinstance(message, Grant):
            if not claimed.keys and lease.granted(message.seq, message.lease_s):
                lease.epoch = message.epoch
                claimed.tokens = message.tokens
                claimed.blocks = message.blocks
                claimed.mark = message.watermark
        elif isinstance(message, Expired):
            lease.refused(message.seq, "the lease has expired")
        elif isinstance(message, Unknown):
            lease.refused(message.seq, "the peer knows no such lease")
        elif isinstance(message, ReleasedOk):
            lease.released_ok(message.seq)
        elif isinstance(message, WatermarkOf):
            self._advance(claimed, message)
        else:
            lease.withdrawn(message.reason or "the peer computes no more of it")

    def _advance(self, claimed: Claimed, message: WatermarkOf) -> None:
        if claimed.lease.epoch is None:
            return  # the grant that is still to come has all blocks
        blocks = list(claimed.blocks or ((),) * len(message.blocks))
        fits = len(message.first) == len(message.blocks) <= len(blocks)
        if not fits or any(at > len(blocks[g]) for g, at in enumerate(message.first)):
            self._send_claim(claimed)  # an earlier one was lost: the grant has all blocks
            return
        for group, (at, ids) in enumerate(zip(message.first, message.blocks, strict=True)):
            blocks[group] = (*blocks[group][:at], *ids)
        claimed.blocks = tuple(blocks)
        claimed.mark = max(claimed.mark, message.watermark)

    def _renewed(self, message: Renewed, peer: str) -> list[Claimed]:
        changed = []
        for one in message.leases:
            claimed = self._claimed.get((peer, one.request))
            if claimed is None or claimed.lease.epoch != one.epoch:
                continue
            if claimed.lease.granted(message.seq, one.lease_s):
                changed.append(claimed)
                if one.watermark > claimed.mark:
                    self._send_claim(claimed)  # a watermark was lost, perhaps with blocks
        for lost, why in (
            (message.expired, "the lease has expired"),
            (message.unknown, "the peer knows no such lease"),
        ):
            for lease in lost:
                claimed = self._claimed.get((peer, lease.request))
                if claimed is not None and claimed.lease.epoch == lease.epoch:
                    claimed.lease.refused(message.seq, why)
                    changed.append(claimed)
        return changed


def _notify(several: Sequence[Claimed]) -> None:
    for claimed in several:
        if claimed.listener is not None:
            claimed.listener()
