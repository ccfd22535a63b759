"""A claim on blocks of a peer, and its state."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from kvconnect.transfer.control.keyed import GrantKeys, Verify
from kvconnect.transfer.control.messages import NOTHING_COMPUTED, Watermark
from kvconnect.transfer.leases.held import HeldLease
from kvconnect.transfer.leases.lease import Blocks
from kvconnect.transfer.peers import PeerLink

# A claim fails with the connection's error after one more attempt to connect, or after this time.
_CONNECT_S = 1.0


@dataclass(slots=True, eq=False)
class Claimed:
    """A claim on a peer's blocks, which this process reads. Only `LeaseClient` changes it.

    Any thread may read the attributes.

    Attributes:
        peer: the address of the peer that has the blocks.
        lease: the lease; decides until when blocks may be read, and whether the reads were valid.
        readers: the number of readers that claim the request, on all ranks together.
        tokens: the length of the prompt in tokens; 0 before the grant.
        blocks: their ids at the peer, for each pool group; replaced, never changed.
        mark: how much of the request is computed; `blocks` has all blocks of that part.
        keys: the keys of the claimed blocks; empty if a request is claimed.
        verify: the blocks whose digests are requested.
        granted: the locations of the blocks of `keys`; ``None`` before the grant.
        reason: why the claim failed; empty if it did not. Also set when the connection is lost,
            although the next connection may still continue the claim.
        link: the connection to the peer; ``None`` before `attach`.
        listener: called when an attribute changed, the outcome was decided, or the peer was
            disconnected. It runs on the thread that received the event, and must neither block nor
            call the client.
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
        """Returns a claim that was never sent and has failed with `reason`."""
        return cls(peer, HeldLease(request), reason=reason)

    def attach(self, link: PeerLink, on_drop: Callable[[Claimed], None]) -> None:
        """Sets `link` as the connection to the peer, and makes the first `drop` call `on_drop`."""
        self._on_drop = on_drop
        self._since, self._attempts = time.monotonic(), link.attempts
        self.link = link

    @property
    def failed(self) -> bool:
        """Returns whether the claim was lost or the peer cannot be reached; `reason` says why."""
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
        """Reports that the peer's blocks are not needed: the first call calls `on_drop`."""
        on_drop, self._on_drop = self._on_drop, None
        if on_drop is not None:
            on_drop(self)
