"""A claim on blocks of a peer, and what has become of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from kvconnect.transfer.control.keyed import GrantKeys, Verify
from kvconnect.transfer.control.messages import NOTHING_COMPUTED, Watermark
from kvconnect.transfer.leases.held import HeldLease
from kvconnect.transfer.leases.table import Blocks
from kvconnect.transfer.peers import PeerLink

__all__ = ["Claimed"]

# What a connection that is tried again may take.
_CONNECT_S = 1.0


@dataclass(slots=True, eq=False)
class Claimed:
    """A request of a peer that this process reads; changed by `LeaseClient` only.

    Any thread may look at it.

    Attributes:
        peer: whose.
        lease: until when it may be read, and whether what was read is valid.
        readers: so many claim it, on all ranks together.
        tokens: of the prompt; 0 before the grant.
        blocks: their ids at the peer, for each pool group; replaced, never changed.
        mark: how much of them is computed, with all blocks for that in `blocks`.
        keys: what is claimed, if that is blocks by key; empty: a request.
        verify: which of their digests are asked for.
        granted: where those blocks are; ``None`` before the grant.
        reason: why it failed, also if the connection was only lost, for those who do not wait for
            the next one; empty: it did not.
        link: to the peer, if `attach` was called.
        listener: called when any of this changed, was decided, or the peer was disconnected. It is
            called on the thread that heard of that, and must neither block nor call the client.
    """

    peer: str
    lease: HeldLease
    readers: int = 1
    tokens: int = 0
    blocks: Blocks = ()
    mark: Watermark = NOTHING_COMPUTED
    keys: tuple[bytes, ...] = ()
    verify: Verify = "none"
    granted: GrantKeys | None = None
    listener: Callable[[], object] | None = None
    reason: str = ""
    link: PeerLink | None = None
    _on_drop: Callable[[Claimed], None] | None = None
    _since: float = 0.0
    _attempts: int = 0

    @classmethod
    def refused(cls, peer: str, request: str, reason: str) -> Self:
        """Returns a claim that was not even sent."""
        return cls(peer, HeldLease(request), reason=reason)

    def attach(self, link: PeerLink, on_drop: Callable[[Claimed], None]) -> None:
        """Makes `link` the way to the peer, and has the first `drop` call `on_drop`."""
        self._on_drop = on_drop
        self._since, self._attempts = time.monotonic(), link.attempts
        self.link = link

    @property
    def failed(self) -> bool:
        """Whether it was lost, or its peer cannot be reached; `reason` says why."""
        if not self.reason and self.link is not None:
            error = self.link.error
            if self.lease.lost is not None:
                self.reason = self.lease.lost
            elif error is not None and (
                self.link.attempts > self._attempts or time.monotonic() > self._since + _CONNECT_S
            ):
                self.reason = f"{self.peer} cannot be reached: {error}"
        return bool(self.reason)

    def drop(self) -> None:
        """Calls `on_drop` of `attach`, once: the peer's blocks are not needed; does not block."""
        on_drop, self._on_drop = self._on_drop, None
        if on_drop is not None:
            on_drop(self)
