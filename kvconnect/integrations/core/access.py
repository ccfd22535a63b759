"""Blocks between an engine's memory and a store, for engines that ask for them page by page."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

from kvconnect.connector.data import LlmArgs, TransferFailure
from kvconnect.connector.offload.background_load import BackgroundLoads
from kvconnect.connector.offload.budget import LookupBudget
from kvconnect.connector.offload.messages import BlockLoad, BlockSave, LoadBlocks, SaveOrder
from kvconnect.connector.offload.save_queue import SaveQueue
from kvconnect.connector.offload.staging import PoolCopier, StagingPool
from kvconnect.connector.offload.store import BlockRoute, OffloadStore
from kvconnect.connector.offload.strided import StridedCopier, StridedPlanes
from kvconnect.errors import KvConnectError, UsageError
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.keys import BlockKey
from kvconnect.trace import count, warn_once

__all__ = ["StoreAccess"]

# A load gives up by itself before the one that waits for it does.
_SPARE_S = 1.0


class StoreAccess:
    """A store and the pools that its blocks go to and come from. No method raises for the store.

    Calls block, each within its deadline, and may come from several threads. Everything between
    pools and store goes through staging memory, so a store that answers too late writes nowhere.

    Args:
        llm_args: of this rank; ``kv_connector_config`` names the store.
        pools: the planes of each pool group, see `kvconnect.integrations.core.memory`.

    Raises:
        ConfigurationError: the store cannot be opened, ``staging_bytes`` is below one block.
    """

    def __init__(self, llm_args: LlmArgs, pools: Sequence[PagedKv | StridedPlanes]) -> None:
        self._config = llm_args.kv_connector_config
        self._tokens_per_block = llm_args.tokens_per_block
        self._open: OffloadStore | None = OffloadStore.acquire(llm_args)
        try:
            self._take(self._open, llm_args, pools)
        except BaseException:
            self._open.release()
            raise

    def _take(
        self, store: OffloadStore, llm_args: LlmArgs, pools: Sequence[PagedKv | StridedPlanes]
    ) -> None:
        on_cuda = pools[0].device.type == "cuda"
        largest = max(layout.block_nbytes for layout in llm_args.layouts)
        staging = StagingPool(self._config.staging_bytes, largest, pin=on_cuda)
        store.backend.register(staging.region)
        copiers = tuple(
            StridedCopier(one, layout, staging)
            if isinstance(one, StridedPlanes)
            else PoolCopier(one, layout, staging)
            for one, layout in zip(pools, llm_args.layouts, strict=True)
        )
        self._route = BlockRoute.of(store, staging, copiers)
        self._budget = LookupBudget(
            self._config.lookup_timeout_ms / 1000, store.backend, store.io.submit
        )
        self._loads = BackgroundLoads(
            self._route, self._loaded, timeout_s=self._config.load_timeout_s
        )
        self._saves = SaveQueue(self._route)
        self._numbers = itertools.count()
        self._asking = threading.Lock()
        self._saving = threading.Lock()
        self._waiting: dict[int, Future[TransferFailure | None]] = {}

    def lookup(self, keys: Sequence[BlockKey], group: int = 0) -> int:
        """How many leading blocks with these chained `keys` the store has, for all ranks.

        Blocks within ``lookup_timeout_ms``; what is late, or failed, counts as 0.
        """
        store = self._store
        if not keys or not store.backend.available:
            return 0
        heads = self._route.heads[group]
        shared = store.backend.capabilities.shared
        wanted = [
            one
            for key in keys
            for one in (
                heads.store_keys(key, group, heads.size)
                if shared
                else (self._route.store_key(key, group),)
            )
        ]
        with self._asking:
            self._budget.start_step()
            asked = store.io.submit(self._budget.timed(store.backend.lookup(wanted)))
            self._budget.wait(asked)
        if not asked.done():
            asked.cancel()
            count("connector.lookup.late")
            return 0
        error = asked.exception()
        if isinstance(error, KvConnectError):
            count("connector.lookup.failed")
            warn_once("connector.lookup", f"lookup failed, the prompt is computed: {error}")
            return 0
        return asked.result() // (len(wanted) // len(keys))

    def load(self, keys: Sequence[BlockKey], block_ids: Sequence[int], group: int = 0) -> int:
        """Fill `block_ids` of the pool with the blocks of these chained `keys`.

        Blocks up to ``load_timeout_s``. Blocks beyond the returned number may hold anything, and
        nothing writes to them any more.

        Returns:
            How many leading ones are there.
        """
        if not keys:
            return 0
        number = next(self._numbers)
        blocks = tuple(
            BlockLoad(key, block_id, group) for key, block_id in zip(keys, block_ids, strict=True)
        )
        size = self._tokens_per_block
        ended = self._waiting[number] = Future()
        self._loads.start(LoadBlocks(number, 0, len(blocks) * size, blocks))
        try:
            failure = ended.result(self._config.load_timeout_s + _SPARE_S)
        except TimeoutError:
            # A store blocks the loop. Nothing is copied from now on but what is under way.
            self._loads.abandon(number)
            warn_once("connector.load.stuck", f"{self._store.backend.name}: blocks its loop")
            time.sleep(_SPARE_S)
            return 0
        finally:
            del self._waiting[number]
        return len(blocks) if failure is None else failure.num_valid_tokens // size

    def save(self, blocks: Sequence[BlockSave], *, namespace: bytes = b"") -> int:
        """Copy `blocks` out of the pool, and write them in the background.

        The blocks may be handed on when this returns. What there is no room for is dropped, or
        with ``on_backlog="wait"`` waited for up to ``save_timeout_s``.

        Returns:
            How many leading ones are on their way to the store.
        """
        store = self._store
        if not blocks:
            return 0
        if not store.backend.available:
            count("connector.save.lost", blocks=len(blocks))
            return 0
        order = SaveOrder(next(self._numbers), tuple(blocks), namespace)
        waits = self._config.on_backlog == "wait"
        with self._saving:
            staged = self._saves.stage(
                order, timeout_s=self._config.save_timeout_s if waits else 0.0
            )
            self._saves.take_lost()  # counted already; no request lives to save them again
        if staged < len(blocks):
            count("connector.save.dropped", blocks=len(blocks) - staged)
        return staged

    def flush(self, timeout_s: float) -> bool:
        """Block until what was saved is written or lost, at most `timeout_s`; whether it is."""
        return self._saves.flush(timeout_s)

    def close(self) -> None:
        """Write what is staged, up to ``save_timeout_s``, and close the store. Idempotent."""
        store, self._open = self._open, None
        if store is None:
            return
        until = store.begin_close()
        self._saves.flush(max(0.0, until - time.monotonic()))
        self._budget.end()
        store.release()

    def _loaded(self, number: int, failure: TransferFailure | None) -> None:
        if (waiting := self._waiting.get(number)) is not None:
            waiting.set_result(failure)

    @property
    def _store(self) -> OffloadStore:
        if self._open is None:
            raise UsageError("StoreAccess: was closed")
        return self._open
