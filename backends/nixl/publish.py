"""The answers to peers: the blocks of this instance, and leases to read them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, takewhile

import numpy as np

from kvconnect.backend import Child
from kvconnect.backends.host.blocks import HostBlocks
from kvconnect.backends.host.index import MemoryBlock
from kvconnect.errors import OutOfBlocks
from kvconnect.keys import BlockKey
from kvconnect.trace import count
from kvconnect.transfer.control.endpoint import Event, Sender
from kvconnect.transfer.control.keyed import (
    MAX_TOKENS,
    ClaimKeys,
    FindChildren,
    FindKeys,
    ForgetKeys,
    ForgotKeys,
    FoundChildren,
    FoundKeys,
    GrantKeys,
    digested,
)
from kvconnect.transfer.control.messages import Claim, LeaseId, Unknown
from kvconnect.transfer.digests import digest_of
from kvconnect.transfer.leases.lease import Ended
from kvconnect.transfer.leases.server import LeaseServer, Send

logger = logging.getLogger("kvconnect")

# The most units of one grant, which has to fit a message; peers claim the rest afterwards.
_MAX_UNITS = 1 << 18
# The limit of leased bytes, a multiple of the region's, because a block counts once for each
# reader.
_LEASED_AT_MOST = 8


class Publisher:
    """Answers peers on their channels' threads, independent of the event loop.

    A block that is leased is held: neither eviction nor deletion reuses its memory before the lease
    has ended.

    Args:
        blocks: the blocks of this instance.
        region: the transport's number of their memory.
        lease_s: the length of a lease.
    """

    def __init__(self, blocks: HostBlocks, region: int, lease_s: float) -> None:
        self._blocks = blocks
        self._region = region
        self._lock = threading.Lock()
        self._held: dict[LeaseId, list[MemoryBlock]] = {}
        self.server = LeaseServer(
            self._unpin,
            max_lease_total=_LEASED_AT_MOST * blocks.region.tensor.numel(),
            lease_s=lease_s,
        )

    @property
    def leases(self) -> int:
        """The number of leases that hold blocks now."""
        return len(self._held)

    def close(self) -> None:
        """Refuses further leases; keeps the memory until the present leases would end."""
        self.server.close(self._blocks.region.tensor)
        with self._lock:
            held, self._held = self._held, {}
        for blocks in held.values():
            self._blocks.release(blocks)

    def deliver(self, channel: Sender, event: Event) -> None:
        """Handles an event of a peer's channel, on the thread of that channel."""
        send = channel.send
        if isinstance(event, FindKeys):
            found = self._blocks.present([BlockKey(key) for key in event.keys])
            send(FoundKeys(seq=event.seq, found=bytes(found)))
        elif isinstance(event, FindChildren):
            parent = None if event.parent is None else BlockKey(event.parent)
            send(_found(event.seq, self._blocks.children(parent)))
        elif isinstance(event, ForgetKeys):
            self._blocks.delete([BlockKey(key) for key in event.keys])
            send(ForgotKeys(seq=event.seq))
        elif isinstance(event, ClaimKeys):
            self._grant(event, channel.peer.holder, send)
        elif isinstance(event, Claim):
            send(Unknown(seq=event.seq, request=event.request, epoch=event.epoch))
        else:
            self.server.deliver(channel, event)

    def _grant(self, claim: ClaimKeys, holder: str, send: Send) -> None:
        blocks = self._hold(claim)
        if not blocks:
            send(Unknown(seq=claim.seq, request=claim.request))
            return
        try:
            grant = self._place(blocks, claim)
            nbytes = self._blocks.region.unit * sum(len(block.units) for block in blocks)
            with self._lock:  # so that `_unpin` cannot run first
                key = self.server.grant_keys(claim, holder, send, grant, nbytes=nbytes)
                self._held[key] = blocks
        except OutOfBlocks as error:
            self._blocks.release(blocks)
            logger.debug("nixl store: %s", error)
            send(Unknown(seq=claim.seq, request=claim.request))
        else:
            count("store.nixl.granted", blocks=len(blocks))

    def _hold(self, claim: ClaimKeys) -> list[MemoryBlock]:
        """Holds and returns the leading blocks that are here and fit one grant."""
        blocks = self._blocks.hold([BlockKey(key) for key in claim.keys])
        units = accumulate(len(block.units) for block in blocks)
        fitting = sum(1 for _ in takewhile(lambda total: total <= _MAX_UNITS, units))
        self._blocks.release(blocks[fitting:])
        return blocks[:fitting]

    def _place(
        self, blocks: Sequence[MemoryBlock], claim: ClaimKeys
    ) -> Callable[[int, float], GrantKeys]:
        """Returns a function that makes the grant from the epoch and seconds of its lease."""
        region = self._blocks.region
        checked = [blocks[index] for index in digested(claim.verify, len(blocks))]
        digests = tuple(digest_of(region.views(block.units, block.nbytes)) for block in checked)
        return lambda epoch, lease_s: GrantKeys(
            seq=claim.seq,
            request=claim.request,
            epoch=epoch,
            lease_s=lease_s,
            region=self._region,
            unit=region.unit,
            sizes=tuple(block.nbytes for block in blocks),
            units=tuple(chain.from_iterable(block.units for block in blocks)),
            digests=digests,
        )

    def _unpin(self, ended: Sequence[Ended]) -> None:
        """Releases the blocks of ended leases; on the reaper's thread."""
        with self._lock:
            held = [self._held.pop(one.key, []) for one in ended]
        for blocks in held:
            self._blocks.release(blocks)


def _found(seq: int, children: Sequence[Child]) -> FoundChildren:
    """Returns the answer with the first of `children` whose tokens fit a message."""
    totals = accumulate(len(child.tokens) for child in children)
    told = children[: sum(1 for _ in takewhile(lambda total: total <= MAX_TOKENS, totals))]
    return FoundChildren(
        seq=seq,
        keys=tuple(child.key for child in told),
        lengths=tuple(len(child.tokens) for child in told),
        tokens=b"".join(np.asarray(child.tokens, "<i4").tobytes() for child in told),
    )
