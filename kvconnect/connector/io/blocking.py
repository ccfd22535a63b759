"""The loads and saves of engines that call the store directly and wait for it."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from kvconnect.connector.data import LlmArgs
from kvconnect.connector.io.access import Access
from kvconnect.connector.io.budget import LookupBudget
from kvconnect.connector.io.copiers import AttachedCopier
from kvconnect.connector.io.load import Loads
from kvconnect.connector.io.lookup import Hit, Lookup
from kvconnect.connector.io.orders import BlockLoad, BlockSave, SaveOrder
from kvconnect.connector.io.runs import RunLoads
from kvconnect.connector.io.save import SaveQueue
from kvconnect.connector.io.strided import StridedPlanes
from kvconnect.errors import KvConnectError, UsageError
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.keys import BlockKey, KeyChain
from kvconnect.shards import StoredHeads
from kvconnect.tokens import TokenBuffer
from kvconnect.trace import count, warn_once

T = TypeVar("T")

# A load ends by its own deadline, this much before its caller stops waiting.
_SPARE_S = 1.0


class StoreAccess:
    """The store of an engine that calls it directly. No method raises an error of the store.

    Calls block, each within its deadline, and may come from several threads. All blocks go through
    staging memory, so a store that answers too late writes nowhere else. In a process forked from
    the one that made it, no block is found and none is saved.

    Args:
        llm_args: the arguments of this rank; ``kv_connector_config`` names the store.
        pools: the planes of each pool group, see `kvconnect.integrations.core.memory`; or the
            device of memory that is attached for each call, see `attached`.

    Raises:
        ConfigurationError: the store cannot be opened, ``staging_bytes`` is below one block.
    """

    def __init__(
        self,
        llm_args: LlmArgs,
        pools: Sequence[PagedKv | StridedPlanes] | torch.device,
    ) -> None:
        self._config = llm_args.kv_connector_config
        self._process = os.getpid()
        self._closed = False
        self._access = Access.open(llm_args, pools)
        store = self._access.store
        self._budget = LookupBudget(
            self._config.lookup_timeout_ms / 1000, store.backend, store.io.submit
        )
        self._lookup = Lookup(store.backend, store.heads)
        self._own_blocks = Lookup(store.backend, store.heads, whole_blocks=True, own_shares=True)
        self._loads = Loads(self._access, timeout_s=self._config.load_timeout_s)
        self._saves = SaveQueue(self._access)
        self._numbers = itertools.count()
        self._asking = threading.Lock()
        self._saving = threading.Lock()
        self._closing = threading.Lock()

    @property
    def attached(self) -> tuple[AttachedCopier, ...]:
        """The copiers, one for each pool group, to which callers attach memory."""
        return self._access.attached

    @property
    def heads(self) -> tuple[StoredHeads, ...]:
        """The KV heads of the model that this rank has, for each pool group."""
        return self._access.heads

    @property
    def saves_tails(self) -> bool:
        """Returns whether tails are saved: the store lists them, and the settings ask for them."""
        return self._access.store.saves_tails

    @property
    def usable(self) -> bool:
        """Returns whether calls reach the store: its breaker is closed, and this is its process.

        Raises:
            UsageError: the access was closed.
        """
        if self._closed:
            raise UsageError("StoreAccess: was closed")
        return self._access.store.backend.available and os.getpid() == self._process

    # ------------------------------------------------------------------ finding

    def find(self, chains: Sequence[KeyChain]) -> list[Hit]:
        """Returns the stored part of each prompt, saved with any tensor parallelism.

        The caller does not use `chains` any more: a late lookup still hashes them.

        Partial tails count. Blocks for at most ``lookup_timeout_ms`` for all prompts together. An
        answer that is late or failed counts as no hit.
        """
        return self._ask([partial(self._lookup.find, chain) for chain in chains], Hit())

    def lookup(self, keys: Sequence[BlockKey], group: int = 0) -> int:
        """Returns how many leading blocks of the chained `keys` are stored for all ranks.

        Blocks for at most ``lookup_timeout_ms``. An answer that is late or failed counts as 0.
        """
        if not keys:
            return 0
        wanted = self._own_blocks.store_keys(keys, group)
        found = self._ask([partial(self._access.store.backend.lookup, wanted)], 0)[0]
        return found // (len(wanted) // len(keys))

    def lookup_with_states(self, keys: Sequence[BlockKey]) -> tuple[int, int]:
        """Returns how many leading blocks of group 0 are stored, and the last end with all states.

        The end is the number of the blocks before it, at most as many as are stored. All other
        groups are states, or parts of them. Blocks for at most ``lookup_timeout_ms``. An answer
        that is late or failed counts as 0.
        """
        if not keys:
            return 0, 0
        size = self.heads[0].layout.tokens_per_block
        tokens = TokenBuffer(np.zeros(len(keys) * size + 1, np.int32))  # not known, nor needed
        chain = KeyChain(keys[0], size, tokens)
        chain.learn(b"".join(keys))
        hit = self._ask([partial(self._own_blocks.find, chain)], Hit())[0]
        return next(iter(hit.num_stored), 0), hit.end // size

    def _ask(self, lookups: Sequence[Callable[[], Coroutine[Any, Any, T]]], nothing: T) -> list[T]:
        """Returns the answer of each lookup; `nothing` for one that is late or failed."""
        if not self.usable:
            return [nothing] * len(lookups)
        asked = [self._access.store.io.submit(self._budget.timed(one)) for one in lookups]
        with self._asking:
            self._budget.start_step()
            for one in asked:
                self._budget.wait(one)
        return [self._answer(one, nothing) for one in asked]

    def _answer(self, asked: Future[T], nothing: T) -> T:
        if not asked.done():
            asked.cancel()
            count("connector.lookup.late")
            return nothing
        error = asked.exception()
        if isinstance(error, KvConnectError):
            count("connector.lookup.failed")
            warn_once("connector.lookup", f"lookup failed, the prompt is computed: {error}")
            return nothing
        return asked.result()

    # ------------------------------------------------------------------ loading

    def load(self, keys: Sequence[BlockKey], block_ids: Sequence[int], group: int = 0) -> int:
        """Fills `block_ids` of the pool with the blocks of the chained `keys`; see `load_all`.

        Returns:
            The number of leading blocks that are in the pool.
        """
        blocks = [
            BlockLoad(key, block_id, group) for key, block_id in zip(keys, block_ids, strict=True)
        ]
        return self.load_all([blocks])[0]

    def load_all(self, orders: Sequence[Sequence[BlockLoad]]) -> list[int]:
        """Loads several runs of blocks; each ends at the first block that cannot be loaded.

        The call returns within ``load_timeout_s``. Blocks beyond the returned numbers may hold any
        bytes, and get no more writes.

        Returns:
            The number of leading blocks of each order that are in the pool.
        """
        if not self.usable:
            return [0] * len(orders)
        ended = threading.Event()
        runs = RunLoads(self._loads, orders, lambda _: ended.set())
        if not ended.wait(self._config.load_timeout_s + _SPARE_S):
            # A store blocks the loop. Only copies that already run continue.
            runs.abandon()
            warn_once("connector.load.stuck", f"{self._access.store.backend.name}: blocks its loop")
            time.sleep(_SPARE_S)
        return list(runs.valid)

    # ------------------------------------------------------------------ saving

    def save(self, blocks: Sequence[BlockSave], *, namespace: bytes = b"") -> int:
        """Copies `blocks` out of the memory, and writes them in the background.

        The memory may be reused when this returns. Blocks without room in the staging memory are
        dropped, or with ``on_backlog="wait"`` waited for up to ``save_timeout_s``.

        Returns:
            The number of leading blocks that are staged for the store.
        """
        if not blocks:
            return 0
        if not self.usable:
            count("connector.save.lost", blocks=len(blocks))
            return 0
        order = SaveOrder(next(self._numbers), tuple(blocks), namespace)
        waits = self._config.on_backlog == "wait"
        with self._saving:
            staged = self._saves.stage(
                order, timeout_s=self._config.save_timeout_s if waits else 0.0
            )
            self._access.lost.clear()  # already counted; its request has ended
        self._saves.count_dropped(len(blocks) - staged)
        return staged

    def flush(self, timeout_s: float) -> bool:
        """Blocks until all saves are written or lost; false after `timeout_s`."""
        return os.getpid() == self._process and self._saves.flush(timeout_s)

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Writes staged blocks for up to ``save_timeout_s``, and closes the store. Idempotent."""
        with self._closing:
            closed, self._closed = self._closed, True
        if closed or os.getpid() != self._process:
            return
        self._saves.drain(self._access.store.begin_close())
        self._budget.end()
        self._access.close()
