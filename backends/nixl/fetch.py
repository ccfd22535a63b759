"""The fetch of blocks from one peer for one load: claimed, read, checked and released."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from kvconnect.backends.lanes import Lanes, results_of
from kvconnect.backends.nixl.pulls import Pulls, Signal
from kvconnect.backends.nixl.settings import NixlSettings
from kvconnect.backends.nixl.staging import Staging
from kvconnect.keys import BlockKey
from kvconnect.trace import count, warn_once
from kvconnect.transfer.claimed import Claimed
from kvconnect.transfer.control.keyed import GrantKeys, Verify, digested
from kvconnect.transfer.digests import digest_of
from kvconnect.transfer.leases.held import Outcome
from kvconnect.transfer.node import PeerNode
from kvconnect.transfer.peers import PeerLink
from kvconnect.transfer.reads import Reads
from kvconnect.transfer.transport import PeerHandle

if TYPE_CHECKING:
    from torch import Tensor

_PORTIONS_IN_FLIGHT = 4
# Seconds without reads from a peer whose blocks did not match their digests.
_AVOID_S = 30.0


class Fetcher:
    """Loads blocks from peers. Belongs to the event loop.

    Args:
        node: the node of this instance, which is open.
        staging: the memory that receives blocks.
        lanes: their threads copy and hash.
        settings: which blocks are compared with the owner's digests, and how long a peer may take
            to answer.
    """

    def __init__(
        self, node: PeerNode, staging: Staging, lanes: Lanes, settings: NixlSettings
    ) -> None:
        self._name = node.engine_id
        self._numbers = itertools.count(1)
        self._client = node.client
        self._pulls = Pulls(
            node.transport, node.rebuild, lanes["control"], timeout_s=settings.timeout_s
        )
        self._staging = staging
        self._lane = lanes["copy"]
        self._verify = settings.verify
        self._timeout_s = settings.timeout_s

    async def fetch(self, link: PeerLink, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        """Fills `into` with blocks of the peer at `link`; returns how many leading ones are valid.

        The blocks count only if the owner kept them until the last read had ended, and their
        digests are right. Otherwise no block counts, and `into` is undefined. Nothing writes to
        `into` any more when this ends.
        """
        handle = link.handle
        if handle is None:
            return 0
        name = f"{self._name}/{next(self._numbers)}"
        claimed = self._client.claim(link.address, name, keys=keys, verify=self._verify)
        claimed.listener = (changed := Signal()).wake
        try:
            granted = await self._granted(link, handle, claimed, changed)
            if granted is None:
                return 0
            sizes = zip(granted.sizes, into, strict=False)
            fitting = sum(1 for _ in takewhile(lambda one: one[0] <= one[1].numel(), sizes))
            into = into[:fitting]
            if not await self._read_all(handle, claimed, granted, into):
                return 0
            if not await self._is_valid(claimed, changed):
                return 0
            if not await self._lane.run(partial(_is_right, granted, self._verify, into)):
                count("store.nixl.bad_digest")
                _avoid(link, "a block that was read from it is not what it has")
                return 0
            count("store.nixl.fetched", blocks=fitting, bytes=sum(granted.sizes[:fitting]))
            return fitting
        finally:
            self._client.abort(claimed, "not needed")

    async def _granted(
        self, link: PeerLink, handle: PeerHandle, claimed: Claimed, changed: Signal
    ) -> GrantKeys | None:
        """Returns the grant of `link`, or ``None`` if there is no usable one in time."""

        def told() -> bool:
            return (
                claimed.granted is not None
                or claimed.lease.outcome is not Outcome.OPEN
                or link.handle is not handle
            )

        if not await self._until(told, changed):
            link.late = True
            count("store.nixl.late")
        granted = claimed.granted
        if granted is None:
            return None
        if len(granted.digests) != len(digested(self._verify, len(granted.sizes))):
            _avoid(link, "it does not tell the digests that it was asked for")
            return None
        return granted

    async def _is_valid(self, claimed: Claimed, changed: Signal) -> bool:
        """Releases the lease; returns whether the owner kept the blocks until the end.

        Called after all reads have ended.
        """
        self._client.release(claimed)
        await self._until(lambda: claimed.lease.outcome is not Outcome.OPEN, changed)
        return claimed.lease.outcome is Outcome.VALID

    async def _until(self, happened: Callable[[], bool], changed: Signal) -> bool:
        """Waits until `happened`, for `timeout_s` at most; returns whether it did."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                while not happened():
                    changed.clear()
                    await changed.wait()
        return happened()

    async def _read_all(
        self, handle: PeerHandle, claimed: Claimed, granted: GrantKeys, into: Sequence[Tensor]
    ) -> bool:
        """Returns whether all blocks arrived; nothing writes to `into` any more when this ends."""
        going_on = [True]
        turns = asyncio.Semaphore(_PORTIONS_IN_FLIGHT)

        async def read(parts: list[Part]) -> None:
            async with turns:
                if not (
                    going_on[0]
                    and claimed.lease.may_read()
                    and await self._read_parts(handle, granted, parts, into)
                ):
                    going_on[0] = False

        together = portions(granted, len(into), self._staging.slot_nbytes)
        # Waits for all reads even if cancelled, because each of them waits for its own end.
        results_of(await asyncio.gather(*map(read, together), return_exceptions=True))
        return going_on[0]

    async def _read_parts(
        self, handle: PeerHandle, granted: GrantKeys, parts: Sequence[Part], into: Sequence[Tensor]
    ) -> bool:
        targets = [into[part.block][part.start : part.start + part.nbytes] for part in parts]
        direct = self._staging.direct(targets)
        if direct is not None:
            return await self._pulls.run(handle, reads_of(granted, parts, *direct))
        slot = await self._staging.take()
        try:
            ends = list(itertools.accumulate((part.nbytes for part in parts), initial=slot))
            reads = reads_of(granted, parts, self._staging.region, ends[:-1])
            if not await self._pulls.run(handle, reads):
                return False
            arrived = self._staging.tensor.numpy()
            sources = [arrived[start:end] for start, end in itertools.pairwise(ends)]
            await self._lane.run(partial(_copy, sources, targets))
            return True
        finally:
            self._staging.give_back(slot)


def _avoid(link: PeerLink, reason: str) -> None:
    """Stops reads from `link` for a while."""
    count("store.nixl.avoided")
    warn_once(f"nixl.avoid {link.address}", f"peer {link.address} is left alone: {reason}")
    link.avoid_until = time.monotonic() + _AVOID_S


def _copy(sources: Sequence[np.ndarray], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        np.copyto(target.numpy(), source)


def _is_right(granted: GrantKeys, verify: Verify, into: Sequence[Tensor]) -> bool:
    """Returns whether the loaded blocks equal the owner's, as far as their digests are known."""
    known = zip(digested(verify, len(granted.sizes)), granted.digests, strict=True)
    return all(
        digest_of([into[index].numpy()[: granted.sizes[index]]]) == digest
        for index, digest in known
        if index < len(into)
    )


@dataclass(frozen=True, slots=True)
class Part:
    """The contiguous bytes of one block.

    Attributes:
        block: the index of the block in the grant.
        start: the offset of the part in the block, in bytes.
        nbytes: the bytes of the part.
        pieces: the offset in the peer's region, and the bytes, of the part in each unit.
    """

    block: int
    start: int
    nbytes: int
    pieces: tuple[tuple[int, int], ...]


def reads_of(
    granted: GrantKeys, parts: Sequence[Part], local_region: int, local: Sequence[int]
) -> list[Reads]:
    """Returns the reads; `local` has the offset of each part in the local region, in bytes.

    Pieces of one size form one `Reads`; blocks of equal length have one or two sizes.
    """
    by_size: dict[int, tuple[list[int], list[int]]] = {}
    for part, at in zip(parts, local, strict=True):
        done = at
        for offset, nbytes in part.pieces:
            far, near = by_size.setdefault(nbytes, ([], []))
            far.append(offset)
            near.append(done)
            done += nbytes
    return [
        Reads(
            granted.region,
            np.array(far, np.int64),
            local_region,
            np.array(near, np.int64),
            nbytes,
            granted.epoch,
        )
        for nbytes, (far, near) in by_size.items()
    ]


def portions(granted: GrantKeys, blocks: int, most: int) -> Iterator[list[Part]]:
    """Yields the first `blocks` blocks of `granted`, as parts to be read together.

    Each list of parts has at most `most` bytes.
    """
    parts: list[Part] = []
    room = most
    for part in _parts(granted, blocks, most):
        if part.nbytes > room:
            yield parts
            parts, room = [], most
        parts.append(part)
        room -= part.nbytes
    if parts:
        yield parts


def _parts(granted: GrantKeys, blocks: int, most: int) -> Iterator[Part]:
    """Yields the parts of the first `blocks` blocks; splits those larger than `most`."""
    unit, first = granted.unit, 0
    for block, size in enumerate(granted.sizes[:blocks]):
        units = granted.units[first : first + -(-size // unit)]
        first += len(units)
        for start in range(0, size, most):
            end = min(size, start + most)
            yield Part(block, start, end - start, tuple(_pieces(units, unit, start, end)))


def _pieces(units: Sequence[int], unit: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    at = start
    while at < end:
        index, within = divmod(at, unit)
        nbytes = min(unit - within, end - at)
        yield units[index] * unit + within, nbytes
        at += nbytes
