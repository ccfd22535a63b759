"""The built-in worker: moves blocks between the pool and a store, and to and from peers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvconnect.connector.data import Direction, KvCachePool, LlmArgs, TransferFailure
from kvconnect.connector.io.access import Access
from kvconnect.connector.io.load import Load, Loads
from kvconnect.connector.io.open_store import OffloadStore
from kvconnect.connector.io.orders import SaveOrder
from kvconnect.connector.io.save import SaveQueue
from kvconnect.connector.io.strided import StridedPlanes
from kvconnect.connector.pair.held_saves import HeldSaves
from kvconnect.connector.pair.messages import OffloadMeta, WorkerMeta
from kvconnect.connector.stream import ForwardStream, cuda_stream
from kvconnect.connector.worker import KvCacheConnectorWorker
from kvconnect.errors import UsageError
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.trace import warn_once

if TYPE_CHECKING:
    from kvconnect.connector.disagg.fetch.fetcher import Fetcher
    from kvconnect.connector.disagg.node import TransferNode
    from kvconnect.connector.disagg.publisher import Publisher

# The worker's deadlines are earlier than the runtime's: the worker knows when its writes have
# ended, whereas the runtime would have to quarantine the blocks.
_OWN_SHARE = 0.9
_NO_ORDERS = OffloadMeta()


class OffloadWorker(KvCacheConnectorWorker):
    """Drives any `Backend`, together with `OffloadScheduler`, through the public connector API.

    All blocks between the pool and the store go through staging slots, ``staging_bytes`` of them.
    They isolate the pool: a store that answers after its deadline writes into a slot, which stays
    the store's until that call has really ended, never into a block. So every failure reported here
    has ``writes_ended``, and no block goes into quarantine because a store is late.

    Blocks without room are dropped and counted, or with ``on_backlog="wait"`` waited for, up to
    ``save_timeout_s``. Blocks of a request that ended are kept and staged as room comes.

    With ``transfer`` the worker also publishes prompts layer by layer and fetches others'. The
    transport itself writes the blocks of a fetch; there is no staging. So the report of a failed
    fetch contains whether writes may still come, and its id is returned once they cannot.
    """

    wakes = True

    def __init__(self, llm_args: LlmArgs) -> None:
        super().__init__(llm_args)
        self._config = llm_args.kv_connector_config
        self._wakeup: Callable[[], None] = lambda: None
        self._ended: deque[tuple[int, TransferFailure | None]] = deque()
        self._failed: list[TransferFailure] = []
        self._load_times: dict[int, list[tuple[int, float]]] = {}
        # The unstaged blocks of ended requests, with the deadlines for staging them.
        self._leaving: dict[int, tuple[SaveOrder, float]] = {}
        self._saved: list[int] = []
        self._missing: dict[int, int] = {}
        self._dropped: set[int] = set()
        self._held = HeldSaves(llm_args.layouts)
        self._saves: SaveQueue | None = None
        self._shared: set[int] = set()  # ended requests whose blocks a reader may need
        self._node: TransferNode | None = None
        self._publisher: Publisher | None = None
        self._fetcher: Fetcher | None = None
        self._open_store: OffloadStore | None = None
        with ExitStack() as undo:
            if self._config.transfer is not None:
                self._open_transfer(undo)
            if self._config.transfer is None or llm_args.has_store:
                self._open_store = OffloadStore.acquire(llm_args)
            undo.pop_all()

    def _open_transfer(self, undo: ExitStack) -> None:
        from kvconnect.connector.disagg.node import TransferNode
        from kvconnect.connector.disagg.publisher import Publisher

        self._node = TransferNode.acquire(self._llm_args)
        undo.callback(self._node.release)
        # An earlier rank with the same heads publishes those.
        is_read = any(one.is_first for one in self._llm_args.stored_heads)
        self._publisher = Publisher(self._node, self._node.layouts, is_read=is_read)

    def register_kv_caches(self, kv_cache_tensor: Tensor) -> None:
        """Registers the only pool; see `register_kv_cache_layout`."""
        self.register_kv_cache_layout([KvCachePool(self._llm_args.layouts[0], kv_cache_tensor)])

    def register_kv_cache_layout(self, pools: Sequence[KvCachePool]) -> None:
        """Registers the pools; see `register_planes`. Makes them readable for peers, and listens.

        Raises:
            ConfigurationError: the transport cannot be used, or the port cannot be had.
        """
        if self._open_store is not None:
            self.register_planes([PagedKv.from_pool(one.tensor, one.layout) for one in pools])
        if self._node is not None:
            self._node.open(pools)
            self._fetcher = self._node.fetcher

    def register_planes(self, pools: Sequence[PagedKv | StridedPlanes]) -> None:
        """Registers the pools, with planes of any strides, and reserves the staging memory.

        Args:
            pools: the planes of each pool group, tokens before heads (NHD).

        Raises:
            ConfigurationError: ``staging_bytes`` is below one block.
        """
        self._on_cuda = pools[0].device.type == "cuda"
        self._access = Access(self._store, pools)
        self._loads = Loads(self._access, timeout_s=_OWN_SHARE * self._config.load_timeout_s)
        self._saves = SaveQueue(self._access)
        self._saves_all = all(map(self._access.saves, range(len(pools))))
        self._access.staging.on_free(self._slots_freed)

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """Sets `wakeup`, which threads of the store and of the transfer call."""
        self._wakeup = wakeup
        if self._node is not None:
            self._node.set_wakeup(wakeup)

    def bind_connector_meta(self, metadata: object) -> None:
        """Receives the step's orders; handles ended requests and published prompts."""
        super().bind_connector_meta(metadata)
        meta = metadata if isinstance(metadata, OffloadMeta) else _NO_ORDERS
        if self._publisher is not None:
            for request_id in meta.lost:
                self._publisher.revoke(request_id)
            self._publisher.begin_step(meta.publish)
            for shared in meta.shared:
                self._shared.add(shared.request_id)
                self._publisher.end(shared)
        for request_id in meta.forgotten:
            self._held.forget(request_id)
        timeout_s = _OWN_SHARE * self._config.save_timeout_s
        for end in meta.ended:
            order = self._held.take(end.request_id, end.end, self._own(end))
            deadline = time.monotonic() + timeout_s if end.waits else 0.0
            self._leaving[end.request_id] = order or replace(end, blocks=()), deadline

    # ------------------------------------------------------------------ loads

    def start_load_kv(self, stream: ForwardStream) -> None:
        """Starts the step's loads; does not block."""
        meta = self._metadata
        if not isinstance(meta, OffloadMeta):
            return
        if meta.loads:
            for copier in self._access.copiers:
                copier.order_copies_in(cuda_stream(stream))
        for order in meta.loads:
            self._loads.start(order, self._load_ended, self._wakeup)
        for request_id, num_tokens in meta.floors.items():
            if self._open_store is not None:
                self._loads.raise_floor(request_id, num_tokens)
            if self._fetcher is not None:
                self._fetcher.raise_floor(request_id, num_tokens)
        if self._node is not None:
            for fetch in meta.fetches:
                self._node.fetch(fetch, self._told, self._wakeup)

    def wait_for_layer_load(self, layer_idx: int, stream: ForwardStream) -> None:
        """Does nothing: no request computes from tokens that are still being loaded."""

    def cancel(self, request_id: int) -> None:
        """Cancels the load of a request; `get_finished` returns its id once no more writes come."""
        if self._open_store is not None:
            self._loads.cancel(request_id)
        if self._fetcher is not None:
            self._fetcher.cancel(request_id)

    def _load_ended(self, load: Load) -> None:
        self._told(load.order.request_id, load.failure)

    def _told(self, request_id: int, failure: TransferFailure | None) -> None:
        """Queues the end or the failure of a load; called on another thread."""
        self._ended.append((request_id, failure))
        self._wakeup()

    # ------------------------------------------------------------------ saves

    def save_kv_layer(self, layer_idx: int, stream: ForwardStream) -> None:
        """Publishes the layer; whole blocks are copied at the end of the forward pass."""
        if self._publisher is not None:
            self._publisher.layer_computed(layer_idx)

    def wait_for_save(self, stream: ForwardStream) -> None:
        """Stages or holds the blocks that the step filled, after the step's work."""
        if self._publisher is not None:
            self._publisher.step_computed()
        meta = self._metadata
        if isinstance(meta, OffloadMeta) and meta.saves:
            timeout_s = self._config.save_timeout_s if self._config.on_backlog == "wait" else 0.0
            deadline = time.monotonic() + timeout_s  # for all of them together
            for order in filter(None, map(self._own, meta.saves)):
                held = self._config.save_on == "finish"
                if (now := self._held.add(order) if held else order) is not None:
                    self._stage(now, cuda_stream(stream), max(0.0, deadline - time.monotonic()))

    def _own(self, order: SaveOrder) -> SaveOrder | None:
        """Returns the part of `order` that this rank saves; ``None`` if there is none.

        An earlier rank with the same heads saves those.
        """
        if self._saves_all:
            return order
        blocks = tuple(block for block in order.blocks if self._access.saves(block.group))
        return replace(order, blocks=blocks) if blocks else None

    def _stage(self, order: SaveOrder, stream: torch.cuda.Stream | None, timeout_s: float) -> None:
        staged = self._queue.stage(order, stream=stream, timeout_s=timeout_s)
        if staged < len(order.blocks):
            self._note_dropped(order, staged)

    def request_reset(self, request_id: int, num_committed: int) -> None:
        """Withdraws a request's prompt; stages its held blocks while there is staging memory."""
        if self._publisher is not None:
            self._publisher.revoke(request_id)
        order = self._held.take(request_id, num_committed)
        if order is None:
            return
        staged = self._queue.stage(order, stream=self._current_stream())
        self._queue.count_dropped(len(order.blocks) - staged)

    @property
    def has_unstaged(self) -> bool:
        """Returns whether blocks of ended requests are not staged yet."""
        return bool(self._leaving)

    def drop_saves(self) -> None:
        """Drops all blocks that are not staged, those of this step among them.

        Used by a runtime that finds the blocks were computed from other tokens or weights than
        their keys describe. Ended requests are reported as saved.
        """
        if isinstance(self._metadata, OffloadMeta):
            self._metadata = replace(self._metadata, saves=())
        self._held = HeldSaves(self._llm_args.layouts)
        self._leaving = {
            request_id: (replace(order, blocks=()), deadline)
            for request_id, (order, deadline) in self._leaving.items()
        }

    def _note_dropped(self, order: SaveOrder, staged: int) -> None:
        """Notes that only the first `staged` blocks of `order` found staging memory."""
        self._note_missing(order.request_id, order.blocks[staged].number)
        self._dropped.add(order.request_id)
        self._queue.count_dropped(len(order.blocks) - staged)

    def _note_missing(self, request_id: int, block: int) -> None:
        self._missing[request_id] = min(block, self._missing.get(request_id, block))

    def _slots_freed(self) -> None:
        """Wakes the engine if ended requests wait for staging memory; on any thread."""
        if self._leaving:
            self._wakeup()

    # ------------------------------------------------------------------ what ended

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Returns the requests whose saves and loads ended since the last call. Does not block.

        A request counts as saved when the blocks that its end ordered are staged, and no reader
        needs them. The order comes with the metadata of the step after that end, perhaps later than
        the request's id.
        """
        self._stage_leaving()
        read = [] if self._publisher is None else self._publisher.take_ended()
        self._shared.difference_update(read)
        done, self._saved = dict.fromkeys((*self._saved, *read)), []
        saved = [one for one in done if one not in self._leaving and one not in self._shared]
        loaded = []
        while self._ended:
            request_id, failure = self._ended.popleft()
            if failure is None:
                loaded.append(request_id)
            else:
                self._failed.append(failure)
        return saved, loaded

    def get_failed(self) -> list[TransferFailure]:
        """Returns the transfers that failed.

        It first stages the remaining blocks of ended requests. So `build_worker_meta` can report
        the dropped ones, even if `get_finished` is the last call of a step.
        """
        self._stage_leaving()
        failed, self._failed = self._failed, []
        return failed

    def get_load_progress(self) -> Mapping[int, int]:
        """Returns for each load beside computing the token from which on all are in the pool."""
        progress = {} if self._fetcher is None else self._fetcher.beside.progress()
        if self._open_store is not None:
            self._load_times = self._loads.times()
            progress |= self._loads.progress()
        return progress

    def get_load_heads(self) -> Mapping[int, int]:
        """Returns for each fetch beside computing the token before which all are in the pool."""
        return {} if self._fetcher is None else self._fetcher.beside.heads

    def get_load_times(self) -> Mapping[int, Sequence[tuple[int, float]]]:
        """Returns the progress of each load beside computing: tokens with seconds."""
        return self._load_times

    def build_worker_meta(self) -> WorkerMeta | None:
        """Returns the blocks that the store lacks, and whether ended requests wait for room."""
        if not (self._missing or self._leaving):
            return None
        missing, self._missing = self._missing, {}
        dropped, self._dropped = frozenset(self._dropped), set()
        return WorkerMeta(missing, bool(self._leaving), dropped)

    def _stage_leaving(self) -> None:
        """Stages the remaining blocks of ended requests while there is staging memory."""
        if self._open_store is None:
            return
        while self._access.lost:
            self._note_missing(*self._access.lost.popleft())
        if not self._leaving:
            return
        stream, now = self._current_stream(), time.monotonic()
        for request_id, (order, deadline) in list(self._leaving.items()):
            staged = self._queue.stage(order, stream=stream)
            left = order.blocks[staged:]
            if not left:
                self._saved.append(request_id)
            elif now >= deadline:
                self._note_dropped(order, staged)
                reason = f"no room in the staging memory for {len(left)} blocks"
                if request_id in self._shared:  # its blocks are not free yet
                    warn_once("disagg.save", f"request {request_id}: {reason}")
                else:
                    self._failed.append(TransferFailure(request_id, Direction.SAVE, reason=reason))
            else:
                self._leaving[request_id] = replace(order, blocks=left), deadline
                continue
            del self._leaving[request_id]

    def _current_stream(self) -> torch.cuda.Stream | None:
        """Returns the engine's stream, for calls outside of a step."""
        return torch.cuda.current_stream() if self._on_cuda else None

    # ------------------------------------------------------------------ the end

    def shutdown(self) -> None:
        """Writes staged blocks and those of ended requests, and ends all fetches and publishing.

        Blocks, for the writes up to ``save_timeout_s``. Idempotent.
        """
        node, self._node = self._node, None
        try:
            self._close_store()
        finally:
            if node is not None and self._publisher is not None:
                self._publisher.shutdown()
                node.close()
                node.release()

    def _close_store(self) -> None:
        store, self._open_store = self._open_store, None
        if store is None:
            return
        drain_until = store.begin_close()
        if self._saves is None:
            store.release()
            return
        for order, _ in self._leaving.values():
            self._saves.stage(order, timeout_s=max(0.0, drain_until - time.monotonic()))
        self._leaving.clear()
        self._saves.drain(drain_until)
        self._access.close()

    @property
    def _store(self) -> OffloadStore:
        if self._open_store is None:
            raise UsageError("OffloadWorker: was shut down")
        return self._open_store

    @property
    def _queue(self) -> SaveQueue:
        if self._saves is None:
            raise UsageError("OffloadWorker: register_kv_caches was not called")
        return self._saves
