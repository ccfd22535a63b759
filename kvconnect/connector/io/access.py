"""The access of a rank to its store: the pools, the staging memory, and the route of a block."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from kvconnect.connector.data import LlmArgs
from kvconnect.connector.io.copiers import AttachedCopier, PoolCopier
from kvconnect.connector.io.head_reader import HeadReader
from kvconnect.connector.io.open_store import OffloadStore
from kvconnect.connector.io.orders import BlockLoad
from kvconnect.connector.io.staging import StagingPool
from kvconnect.connector.io.strided import StridedCopier, StridedPlanes
from kvconnect.explain.outcome import Outcome
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.keys import BlockKey, store_key
from kvconnect.layout import KvCacheLayout
from kvconnect.trace import metrics

CALL_NBYTES = 16 << 20
"""The bytes of blocks in one call to the store.

Enough to hide a call's fixed costs, and few enough for a slow store to end the call in time."""

LOADS_IN_FLIGHT = 3
"""The calls of one load that run at a time. As many pieces more may wait to be copied."""

SAVES_IN_FLIGHT = 3
"""The calls of all saves that run at a time: one in the store, one before it, one after it."""


# Below this size the first load allocates the pages itself, which takes some 2 ms for each MiB.
_TOUCHED_NBYTES = 8 << 20

CopierOf = Callable[[PagedKv, KvCacheLayout, StagingPool], PoolCopier]


class Access:
    """The pools of a rank, its open store, and the staging memory between them.

    Thread-safe. Slots have room for the largest block of any pool. A stored block is its planes one
    after the other, tokens before heads, whatever the order in the pool.

    Args:
        store: the open store; `close` releases it.
        pools: the planes of each pool group, tokens before heads (NHD); or the device of memory
            that is attached for each call, see `attached`.
        copier: the copier of pools whose rows are contiguous.

    Attributes:
        store: the store.
        staging: ``staging_bytes`` of slots.
        copiers: the copier of each pool group.
        attached: the `copiers` if memory is attached for each call; else empty.
        heads: the KV heads of the model that the rank has, for each pool group.
        reader: reads blocks that were saved with another tensor parallelism.
        call_blocks: the number of blocks in one call to the store.
        lost: requests, each with the number of a block to save anew: it could not be written, or
            was gone when it was loaded. The engine's thread takes them.

    Raises:
        ConfigurationError: ``staging_bytes`` is below one block.
    """

    def __init__(
        self,
        store: OffloadStore,
        pools: Sequence[PagedKv | StridedPlanes] | torch.device,
        copier: CopierOf = PoolCopier,
    ) -> None:
        args, layouts = store.llm_args, store.llm_args.layouts
        device = pools if isinstance(pools, torch.device) else pools[0].device
        largest = max(layout.block_nbytes for layout in layouts)
        staging_bytes = args.kv_connector_config.staging_bytes
        staging = StagingPool(staging_bytes, largest, pin=device.type == "cuda")
        store.backend.register(staging.region)
        self.store = store
        self.staging = staging
        self.attached: tuple[AttachedCopier, ...] = ()
        self.copiers: tuple[PoolCopier, ...]
        if isinstance(pools, torch.device):
            self.attached = tuple(AttachedCopier(one, staging, device) for one in layouts)
            self.copiers = self.attached
        else:
            self.copiers = tuple(
                StridedCopier(one, layout, staging)
                if isinstance(one, StridedPlanes)
                else copier(one, layout, staging)
                for one, layout in zip(pools, layouts, strict=True)
            )
        self.heads = store.heads
        self.reader = HeadReader(store, staging)
        self.call_blocks = max(1, min(256, CALL_NBYTES // staging.slot_nbytes))
        at_once = min(LOADS_IN_FLIGHT * self.call_blocks, staging.num_slots // 2)
        if at_once * staging.slot_nbytes >= _TOUCHED_NBYTES:
            # Otherwise the first load of a process would wait for its pages.
            store.copying.submit(lambda: staging.touch(at_once))
        self.lost: deque[tuple[int, int]] = deque()
        self._hide_gauges = metrics.add_gauges(staging.sizes)

    @classmethod
    def open(
        cls,
        llm_args: LlmArgs,
        pools: Sequence[PagedKv | StridedPlanes] | torch.device,
        copier: CopierOf = PoolCopier,
    ) -> Access:
        """Returns an access to the store of `llm_args`, and opens the store unless it is open.

        Raises:
            ConfigurationError: the store cannot be opened, or ``staging_bytes`` is below one block.
        """
        store = OffloadStore.acquire(llm_args)
        try:
            return cls(store, pools, copier)
        except BaseException:
            store.release()
            raise

    def close(self) -> None:
        """Releases the store. Its last user closes it, which blocks."""
        self._hide_gauges()
        self.store.release()

    def frame(self, slot: int, group: int) -> Tensor:
        """Returns the memory of the staging `slot` for the frame of a block of `group`."""
        return self.staging.frame(slot, self.copiers[group].layout.block_nbytes)

    def store_key(self, key: BlockKey, group: int) -> BlockKey:
        """Returns the key in the store of the rank's block of `group` with the chained `key`."""
        return store_key(key, group, self.heads[group].own)

    def saves(self, group: int) -> bool:
        """Returns whether the rank saves its blocks of `group`.

        In a shared store only the first rank with the same heads saves them.
        """
        return self.heads[group].is_first or not self.store.backend.capabilities.shared

    def wait_for_copies_in(self, groups: Iterable[int]) -> None:
        """Blocks until the copies into the pools of `groups` that were enqueued so far are over."""
        for group in groups:
            event = self.copiers[group].mark_copies_in()
            if event is not None:
                event.synchronize()

    async def fetch(self, blocks: Sequence[BlockLoad], slots: Sequence[int]) -> int:
        """Reads `blocks` from the store into staging `slots`. Runs on the store's loop.

        Returns:
            The number of leading slots that hold their block.

        Raises:
            BackendTimeout: the store may write into the slots until `pending` is done.
            KvConnectError: the store failed; the content of the slots is undefined.
        """
        filled = 0
        for shares, same in groupby(blocks, _other_shares):
            run = list(same)
            rooms = slots[filled : filled + len(run)]
            if shares is None:
                keys = [self.store_key(block.key, block.group) for block in run]
                frames = [
                    self.frame(slot, block.group) for slot, block in zip(rooms, run, strict=True)
                ]
                got = await self.store.backend.load(keys, frames)
            else:
                got = await self.reader.fetch(run, rooms, shares[1])
            filled += got
            if got < len(run):
                break
        return filled

    def loss_of(self, block: BlockLoad) -> Outcome:
        """Returns the outcome of the tokens of `block`, which the store did not load."""
        keys = [self.store_key(block.key, block.group)]
        if block.shares is not None:
            keys = self.reader.keys([block], block.shares)
        damaged = any(map(self.store.backend.was_damaged, keys))
        return Outcome.DAMAGED if damaged else Outcome.EVICTED


class CallTimes:
    """The measured time of calls to a store: of an answer, and of each block.

    Attributes:
        answer_s: seconds of a call for one block, on average; 0.0: unknown.
        block_s: seconds for each block beyond that, in calls at once; 0.0: unknown.
    """

    def __init__(self) -> None:
        self.answer_s = 0.0
        self.block_s = 0.0

    def record(self, num_blocks: int, seconds: float) -> None:
        """Adds a call that loaded `num_blocks`."""
        if num_blocks == 1:
            self.answer_s = 0.5 * (self.answer_s or seconds) + 0.5 * seconds
        elif num_blocks and self.answer_s:
            block_s = max(0.0, seconds - self.answer_s) / (num_blocks - 1)
            self.block_s = 0.7 * (self.block_s or block_s) + 0.3 * block_s

    def hiding(self, most: int) -> int:
        """Returns the blocks per call, up to `most`, that hide the time of an answer."""
        if not self.answer_s:
            return 1
        if not self.block_s:
            return most
        return min(most, 1 + int(1.5 * self.answer_s / self.block_s))


def _other_shares(block: BlockLoad) -> tuple[int, int] | None:
    """Returns the pool group and the number of shares of a block saved in other shares.

    Returns ``None`` for a block saved as the ranks of this engine save it.
    """
    return None if block.shares is None else (block.group, block.shares)
