"""The store's pair where no store is configured: it finds and keeps no blocks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvconnect.connector.data import KvCachePool, SchedulerOutput
from kvconnect.connector.scheduler import KvCacheConnectorScheduler
from kvconnect.connector.stream import ForwardStream
from kvconnect.connector.worker import KvCacheConnectorWorker
from kvconnect.request import LlmRequest

__all__ = ["NoStoreScheduler", "NoStoreWorker"]


class NoStoreScheduler(KvCacheConnectorScheduler):
    """The scheduler of a connector without a store: loads and saves nothing."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> None:
        """Returns None: the workers have no work."""

    def get_num_new_matched_tokens(
        self, request: LlmRequest, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Returns that no tokens can be loaded."""
        return 0, False

    def update_state_after_alloc(self, request: LlmRequest, block_ids: list[int]) -> None:
        """Does nothing."""

    def request_finished(self, request: LlmRequest, cache_block_ids: list[int]) -> bool:
        """Returns False: the blocks are not kept."""
        return False


class NoStoreWorker(KvCacheConnectorWorker):
    """The worker of a connector without a store: loads and saves nothing."""

    wakes = True

    def register_kv_caches(self, kv_cache_tensor: Tensor) -> None:
        """Does nothing."""

    def register_kv_cache_layout(self, pools: Sequence[KvCachePool]) -> None:
        """Does nothing."""

    def start_load_kv(self, stream: ForwardStream) -> None:
        """Does nothing."""

    def wait_for_layer_load(self, layer_idx: int, stream: ForwardStream) -> None:
        """Returns at once."""

    def save_kv_layer(self, layer_idx: int, stream: ForwardStream) -> None:
        """Does nothing."""

    def wait_for_save(self, stream: ForwardStream) -> None:
        """Returns at once."""

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Returns no requests."""
        return [], []
