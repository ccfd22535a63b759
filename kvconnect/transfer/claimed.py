"""A claim on blocks of a peer, and what has become of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvconnect.transfer.control.keyed import GrantKeys, Verify
from kvconnect.transfer.control.messages import NOTHING_COMPUTED, Watermark
from kvconnect.transfer.leases.held import HeldLease
from kvconnect.transfer.leases.table import Blocks

__all__ = ["Claimed"]


@dataclass(slots=True, eq=False)
class Claimed:
    """A request of a peer that this process reads; changed by `LeaseClient` only.

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
