"""Reads blocks that were saved with another tensor parallelism, and cuts them to a rank's heads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future

from kvconnect.connector.data import Direction
from kvconnect.connector.io.open_store import OffloadStore
from kvconnect.connector.io.orders import BlockLoad
from kvconnect.connector.io.staging import StagingPool
from kvconnect.errors import BackendTimeout
from kvconnect.frame import frame_nbytes
from kvconnect.kernels.block_copy import copy_pairs
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.keys import BlockKey, store_key

_PART_OF_STAGING = 8
_LOOK_S = 0.001


class HeadReader:
    """Fills a rank's staging slots from blocks whose heads are divided into other shares.

    The rank's heads are cut out of a wider block; several narrower blocks are joined. The blocks
    arrive in memory of their own, allocated at the first such load. For each number of shares that
    memory has an eighth of the size of the staging memory, or the size of one block if that is
    more. Belongs to the store's loop.

    Args:
        store: the store that is read; its threads cut and join.
        staging: the pool of the slots that are filled.
    """

    def __init__(self, store: OffloadStore, staging: StagingPool) -> None:
        self._backend = store.backend
        self._copying = store.copying
        self._heads = store.heads
        self._staging = staging
        self._arrivals: dict[int, StagingPool] = {}
        self._copies: dict[tuple[int, int], list[tuple[PagedKv, PagedKv]]] = {}

    async def fetch(self, blocks: Sequence[BlockLoad], slots: Sequence[int], shares: int) -> int:
        """Reads `blocks` of one pool group, stored in so many `shares`, into `slots`.

        Waits for free memory, at most as long as a call to the store may take. The payload of a
        slot is filled; its header stays unchanged.

        Returns:
            The number of leading slots that hold their block.

        Raises:
            KvConnectError: the store failed, or there was no memory; nothing writes to the slots.
        """
        group = blocks[0].group
        parts = self._heads[group].slices(shares)
        arrivals = self._room(shares)
        deadline = asyncio.get_running_loop().time() + self._backend.deadline_s
        filled = 0
        while filled < len(blocks):
            wanted = blocks[filled : filled + arrivals.num_slots // len(parts)]
            rooms = await self._take(arrivals, len(wanted) * len(parts), len(parts), deadline)
            if not rooms:
                raise BackendTimeout("no room for blocks of another tensor_parallel_size")
            wanted = wanted[: len(rooms) // len(parts)]
            pending: Future[None] | None = None
            try:
                whole = await self._read(wanted, rooms, shares) // len(parts)
                targets = slots[filled : filled + whole]
                await self._copying.run(lambda: self._copy(group, shares, rooms, targets))  # noqa: B023  awaited here
            except BackendTimeout as error:
                pending = error.pending  # the call may still write to `rooms`, not to `slots`
                raise BackendTimeout(str(error)) from error
            finally:
                arrivals.give_back(Direction.LOAD, rooms, pending)
            filled += whole
            if whole < len(wanted):
                break
        return filled

    def keys(self, blocks: Sequence[BlockLoad], shares: int) -> list[BlockKey]:
        """Returns the keys of the parts of `blocks`, of one pool group, that this rank reads."""
        group = blocks[0].group
        parts = self._heads[group].slices(shares)
        return [store_key(block.key, group, part.shard) for block in blocks for part in parts]

    async def _take(
        self, arrivals: StagingPool, at_most: int, multiple_of: int, deadline: float
    ) -> list[int]:
        """Takes up to `at_most` slots, a multiple of `multiple_of`, waiting until `deadline`.

        Holds no slots while it waits, so that two loads cannot block each other.
        """
        while True:
            rooms = arrivals.take(Direction.LOAD, at_most)
            spare = len(rooms) % multiple_of
            arrivals.give_back(Direction.LOAD, rooms[len(rooms) - spare :])
            if len(rooms) > spare or asyncio.get_running_loop().time() >= deadline:
                return rooms[: len(rooms) - spare]
            # Other loads hold all slots. They release some within milliseconds.
            await asyncio.sleep(_LOOK_S)

    async def _read(self, blocks: Sequence[BlockLoad], rooms: Sequence[int], shares: int) -> int:
        layout = self._heads[blocks[0].group].layout_of(shares)
        arrivals = self._arrivals[shares]
        frames = [arrivals.frame(room, layout.block_nbytes) for room in rooms]
        return await self._backend.load(self.keys(blocks, shares), frames, layout=layout)

    def _copy(self, group: int, shares: int, rooms: Sequence[int], targets: Sequence[int]) -> None:
        """Copies the heads of each part of a block to the block's slot; on a copy thread."""
        copies = self._views(group, shares)
        for number, (source, target) in enumerate(copies):
            own = rooms[number :: len(copies)][: len(targets)]
            copy_pairs(source, target, own, targets)

    def _views(self, group: int, shares: int) -> list[tuple[PagedKv, PagedKv]]:
        """Returns, for each part of a block, the views to copy from and to copy to."""
        known = self._copies.get((group, shares))
        if known is None:
            heads = self._heads[group]
            arriving = self._arrivals[shares].paged(heads.layout_of(shares))
            staged = self._staging.paged(heads.layout)
            known = self._copies[group, shares] = [
                (_heads_of(arriving, part.source), _heads_of(staged, part.target))
                for part in heads.slices(shares)
            ]
        return known

    def _room(self, shares: int) -> StagingPool:
        known = self._arrivals.get(shares)
        if known is None:
            heads = [one for one in self._heads if shares in one.sizes]
            nbytes = max(one.layout_of(shares).block_nbytes for one in heads)
            least = max(len(one.slices(shares)) for one in heads) * frame_nbytes(nbytes)
            part = self._staging.region.numel() // _PART_OF_STAGING
            known = StagingPool(max(least, part), nbytes, loads_only=True)
            self._arrivals[shares] = known
        return known


def _heads_of(blocks: PagedKv, heads: slice) -> PagedKv:
    views = [view[:, :, heads] for view in blocks.views]
    return PagedKv.from_views(views, per_layer=blocks.per_layer)
