"""The way of one rank's blocks between its pools and the store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kvconnect.connector.offload.messages import BlockLoad
from kvconnect.connector.offload.pool_copier import PoolCopier
from kvconnect.connector.offload.staging import Slot, StagingPool
from kvconnect.connector.offload.store import OffloadStore
from kvconnect.errors import BackendTimeout, KvConnectError
from kvconnect.keys import Shard, store_key
from kvconnect.layout import KvCacheLayout

__all__ = ["BlockRoute", "Fetched"]


@dataclass(frozen=True, slots=True)
class Fetched:
    """What came of a call to the store.

    Attributes:
        filled: leading slots that hold their block.
        reason: why not all of them do.
        pending: the store may write into the slots until these are done.
    """

    filled: int
    reason: str = ""
    pending: tuple[Future[None], ...] = ()


@dataclass(frozen=True, slots=True)
class BlockRoute:
    """Store, staging memory and the copiers of a rank's pool groups. Thread-safe as those are.

    The rank is `shard` of the model.
    """

    store: OffloadStore
    staging: StagingPool
    copiers: tuple[PoolCopier, ...]
    shard: Shard

    @property
    def layouts(self) -> tuple[KvCacheLayout, ...]:
        """Of the pool groups."""
        return tuple(copier.layout for copier in self.copiers)

    def slot_for(self, slot: Slot, group: int) -> Slot:
        """`slot` with just the room that a block of `group` takes."""
        return slot.sized(self.copiers[group].layout.block_nbytes)

    def wait_for_copies_in(self, groups: Iterable[int] | None = None) -> None:
        """Block until the copies into the pools (of `groups`) enqueued so far are over."""
        for group in range(len(self.copiers)) if groups is None else groups:
            event = self.copiers[group].mark_copies_in()
            if event is not None:
                event.synchronize()

    async def fetch(self, blocks: Sequence[BlockLoad], slots: Sequence[Slot]) -> Fetched:
        """Read `blocks` from the store into `slots`, each of its block's size. On its loop."""
        keys = [store_key(block.key, block.group, self.shard) for block in blocks]
        try:
            filled = await self.store.backend.load(keys, [slot.frame for slot in slots])
        except BackendTimeout as error:
            pending = () if error.pending is None else (error.pending,)
            return Fetched(0, str(error), pending)
        except KvConnectError as error:
            return Fetched(0, str(error))
        missing = filled < len(slots)
        return Fetched(filled, "a block is gone from the store, or was damaged" if missing else "")
