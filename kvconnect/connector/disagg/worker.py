"""The transfer pair's worker: publishes what a step computes, fetches what others have."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from kvconnect.connector.data import Direction, KvCachePool, LlmArgs, TransferFailure
from kvconnect.connector.disagg.messages import DisaggMeta, WorkerMeta
from kvconnect.connector.disagg.no_store import NoStoreWorker
from kvconnect.connector.disagg.node import TransferNode
from kvconnect.connector.disagg.publisher import Publisher
from kvconnect.connector.pair.worker import OffloadWorker
from kvconnect.connector.stream import ForwardStream
from kvconnect.connector.worker import KvCacheConnectorWorker
from kvconnect.trace import warn_once

__all__ = ["DisaggWorker"]


class DisaggWorker(KvCacheConnectorWorker):
    """Publishes prompts layer by layer and fetches others', beside the store's worker.

    The transport itself writes the blocks of a fetch; there is no staging. So a failed fetch says
    whether writes may still come, and its id is returned once they cannot.
    """

    wakes = True

    def __init__(self, llm_args: LlmArgs) -> None:
        super().__init__(llm_args)
        self._node: TransferNode | None = TransferNode.acquire(llm_args)
        try:
            self._store = _store_of(llm_args)
        except BaseException:
            self._node.release()
            raise
        self._held: dict[int, set[str]] = {}
        self._open_node = self._node
        # Heads that an earlier rank holds, too, are read from that one.
        is_read = any(one.is_first for one in llm_args.stored_heads)
        self._publisher = Publisher(self._node, llm_args.layouts, is_read=is_read)

    # ------------------------------------------------------------------ the start

    def register_kv_caches(self, kv_cache_tensor: Tensor) -> None:
        """Registers the only pool; see `register_kv_cache_layout`."""
        self.register_kv_cache_layout([KvCachePool(self._llm_args.layouts[0], kv_cache_tensor)])

    def register_kv_cache_layout(self, pools: Sequence[KvCachePool]) -> None:
        """Makes the pools readable for peers, and listens for them.

        Raises:
            ConfigurationError: the transport cannot be used, or the port cannot be had.
        """
        self._store.register_kv_cache_layout(pools)
        self._open_node.open(pools)

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """Sets `wakeup`, which threads of the transfer and of the store call."""
        self._store.set_wakeup(wakeup)
        self._open_node.set_wakeup(wakeup)

    def register_forward_pass_callable(self) -> Callable[[], None] | None:
        """Returns the store's callable."""
        return self._store.register_forward_pass_callable()

    # ------------------------------------------------------------------ one step

    def bind_connector_meta(self, metadata: object) -> None:
        """Takes the step's orders: which prompts it computes, and which requests ended."""
        super().bind_connector_meta(metadata)
        if not isinstance(metadata, DisaggMeta):
            return
        if metadata.store is not None:
            self._store.bind_connector_meta(metadata.store)
        for request_id in metadata.lost:
            self._publisher.revoke(request_id)
        self._publisher.begin_step(metadata.publish)
        for end in metadata.ends:
            self._held[end.request_id] = set()
            if end.stored:
                self._held[end.request_id].add("store")
            if end.shared:
                self._held[end.request_id].add("readers")
                self._publisher.end(end)

    def clear_connector_meta(self) -> None:
        """Ends the step."""
        super().clear_connector_meta()
        self._store.clear_connector_meta()

    def start_load_kv(self, stream: ForwardStream) -> None:
        """Starts the step's loads; does not block."""
        self._store.start_load_kv(stream)
        if isinstance(self._metadata, DisaggMeta):
            for order in self._metadata.fetches:
                self._open_node.fetch(order)

    def wait_for_layer_load(self, layer_idx: int, stream: ForwardStream) -> None:
        """Waits for what the store loads in this step."""
        self._store.wait_for_layer_load(layer_idx, stream)

    def save_kv_layer(self, layer_idx: int, stream: ForwardStream) -> None:
        """Publishes the layer, and passes it to the store."""
        self._store.save_kv_layer(layer_idx, stream)
        self._publisher.layer_computed(layer_idx)

    def wait_for_save(self, stream: ForwardStream) -> None:
        """Counts the prompts that the step completed, and waits for the store's copies."""
        self._publisher.step_computed()
        self._store.wait_for_save(stream)

    def request_reset(self, request_id: int, num_committed: int) -> None:
        """Withdraws the request's prompt, and lets the store copy what it held."""
        self._publisher.revoke(request_id)
        self._store.request_reset(request_id, num_committed)

    # ------------------------------------------------------------------ what ended

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Returns requests whose blocks neither a reader nor the store needs, and loaded ones."""
        fetcher = self._open_node.fetcher
        ours = set[int]() if fetcher is None else fetcher.among(started_loading_req_ids)
        stored, loaded = self._store.get_finished(
            [one for one in finished_gen_req_ids if "store" in self._held.get(one, ())],
            [one for one in started_loading_req_ids if one not in ours],
        )
        saved = [one for one in stored if self._let_go(one, "store")]
        shared = self._publisher.take_ended()
        saved += [one for one in shared if self._let_go(one, "readers")]
        return saved, loaded if fetcher is None else loaded + fetcher.take_ended()

    def _let_go(self, request_id: int, holder: str) -> bool:
        """Removes `holder` of the request's blocks; returns whether it was the last one."""
        held = self._held.get(request_id)
        if held is None or holder not in held:
            return False
        held.discard(holder)
        if held:
            return False
        del self._held[request_id]
        return True

    def get_failed(self) -> list[TransferFailure]:
        """Returns the fetches that fail, and the store's failures."""
        fetcher = self._open_node.fetcher
        failures = [] if fetcher is None else fetcher.take_failed()
        for failure in self._store.get_failed():
            held = self._held.get(failure.request_id, set())
            if failure.direction is Direction.SAVE and "readers" in held:
                # The blocks are not free yet: a reader may hold them.
                warn_once("disagg.save", f"request {failure.request_id}: {failure.reason}")
                held.discard("store")
                continue
            if failure.direction is Direction.SAVE:
                self._held.pop(failure.request_id, None)
            failures.append(failure)
        return failures

    def build_worker_meta(self) -> WorkerMeta | None:
        """Returns the metadata of the store's worker."""
        store = self._store.build_worker_meta()
        return None if store is None else WorkerMeta(store)

    def cancel(self, request_id: int) -> None:
        """Cancels the request's load; `get_finished` returns its id once no more writes come."""
        fetcher = self._open_node.fetcher
        if fetcher is None or not fetcher.cancel(request_id):
            self._store.cancel(request_id)

    def shutdown(self) -> None:
        """Writes what is to be stored, and ends all fetches and publishing. Blocks; idempotent."""
        node, self._node = self._node, None
        if node is None:
            return
        try:
            self._store.shutdown()
        finally:
            self._publisher.shutdown()
            node.close()
            node.release()


def _store_of(llm_args: LlmArgs) -> KvCacheConnectorWorker:
    if not llm_args.has_store:
        return NoStoreWorker(llm_args)
    return OffloadWorker(llm_args)
