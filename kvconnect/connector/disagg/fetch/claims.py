"""What a request asks another engine for, from its arrival on."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvconnect.transfer.claimed import Claimed
from kvconnect.transfer.peers import PeerLink

__all__ = ["Claim"]

# What a connection that is tried again may take.
_CONNECT_S = 1.0


class Claim:
    """A claim on another engine's blocks, made when a request arrives. Any thread may look at it.

    Args:
        address: of the other engine, ``host:port``.
        name: of the prompt, see `transfer_name`.
        link: to the other engine, with `claimed`, the lease; ``None``: it could not be asked.
        reason: why not.
        on_drop: called once, when it is dropped.

    Attributes:
        reason: why nothing will come of it; empty: perhaps something will.
    """

    def __init__(
        self,
        address: str,
        name: str,
        *,
        link: PeerLink | None = None,
        claimed: Claimed | None = None,
        reason: str = "",
        on_drop: Callable[[Claim], None] = lambda _: None,
    ) -> None:
        self.address = address
        self.name = name
        self.link = link
        self.claimed = claimed
        self.reason = reason
        self._on_drop: Callable[[Claim], None] | None = on_drop
        self._since = time.monotonic()
        self._attempts = link.attempts if link is not None else 0

    @property
    def failed(self) -> bool:
        """Whether nothing will come of it; `reason` says why."""
        if not self.reason and self.claimed is not None and self.link is not None:
            error = self.link.error
            if self.claimed.lease.lost is not None:
                self.reason = self.claimed.lease.lost
            elif error is not None and (
                self.link.attempts > self._attempts or time.monotonic() > self._since + _CONNECT_S
            ):
                self.reason = f"{self.address} cannot be reached: {error}"
        return bool(self.reason)

    def drop(self) -> None:
        """Tell the other engine that its blocks are not needed; does not block, idempotent."""
        on_drop, self._on_drop = self._on_drop, None
        if on_drop is not None:
            on_drop(self)
