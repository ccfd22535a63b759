"""A rank's blocks' way between its pools and the store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from kvconnect.connector.io.copiers import PoolCopier
from kvconnect.connector.io.fetched import Fetched, fetched
from kvconnect.connector.io.head_reader import HeadReader
from kvconnect.connector.io.open_store import OffloadStore
from kvconnect.connector.io.orders import BlockLoad
from kvconnect.connector.io.staging import Slot, StagingPool
from kvconnect.keys import BlockKey, store_key
from kvconnect.layout import KvCacheLayout
from kvconnect.shards import StoredHeads

__all__ = ["CALL_NBYTES", "LOADS_IN_FLIGHT", "SAVES_IN_FLIGHT", "BlockRoute"]

CALL_NBYTES = 16 << 20
"""Blocks of one call to the store: so many that its fixed costs hardly show, few enough that a slow
store ends a call in time."""

LOADS_IN_FLIGHT = 3
"""Calls for one load at a time. As many pieces again may have arrived, and be copied meanwhile."""

SAVES_IN_FLIGHT = 3
"""Calls of all saves: one with the store, one before it and one behind it."""


@dataclass(frozen=True, slots=True)
class BlockRoute:
    """Store, staging memory and the copiers of a rank's pool groups. Thread-safe as those are.

    `heads` says for each group which part of the model's KV heads the rank has.
    """

    store: OffloadStore
    staging: StagingPool
    copiers: tuple[PoolCopier, ...]
    heads: tuple[StoredHeads, ...]
    reader: HeadReader

    @classmethod
    def of(
        cls, store: OffloadStore, staging: StagingPool, copiers: tuple[PoolCopier, ...]
    ) -> BlockRoute:
        """The route between `store` and the pools of `copiers`, through `staging`."""
        heads = store.heads
        reader = HeadReader(store.backend, store.copying, heads, staging)
        return cls(store, staging, copiers, heads, reader)

    @property
    def layouts(self) -> tuple[KvCacheLayout, ...]:
        """Of the pool groups."""
        return tuple(copier.layout for copier in self.copiers)

    def slot_for(self, slot: Slot, group: int) -> Slot:
        """`slot` with just the room that a block of `group` takes."""
        return slot.sized(self.copiers[group].layout.block_nbytes)

    def store_key(self, key: BlockKey, group: int) -> BlockKey:
        """What the store knows the rank's block of `group` with this `key` by."""
        return store_key(key, group, self.heads[group].own)

    def saves(self, group: int) -> bool:
        """Whether the rank saves its blocks of `group`: no other one saves the same heads."""
        return self.heads[group].is_first or not self.store.backend.capabilities.shared

    def wait_for_copies_in(self, groups: Iterable[int] | None = None) -> None:
        """Block until the copies into the pools (of `groups`) enqueued so far are over."""
        for group in range(len(self.copiers)) if groups is None else groups:
            event = self.copiers[group].mark_copies_in()
            if event is not None:
                event.synchronize()

    async def fetch(self, blocks: Sequence[BlockLoad], slots: Sequence[Slot]) -> Fetched:
        """Read `blocks` from the store into `slots`, each of its block's size. On its loop."""
        filled = 0
        for shares, same in groupby(blocks, _other_shares):
            run = list(same)
            rooms = slots[filled : filled + len(run)]
            if shares is None:
                keys = [self.store_key(block.key, block.group) for block in run]
                frames = [slot.frame for slot in rooms]
                got = await fetched(self.store.backend.load(keys, frames), len(run))
            else:
                got = await self.reader.fetch(run, rooms, shares[1])
            filled += got.filled
            if got.filled < len(run):
                return replace(got, filled=filled)
        return Fetched(filled)


def _other_shares(block: BlockLoad) -> tuple[int, int] | None:
    """Pool group and number of shares of a block that no rank of this size saved, else ``None``."""
    return None if block.shares is None else (block.group, block.shares)
