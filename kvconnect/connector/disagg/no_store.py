"""The store's pair where no store is configured: it finds nothing and keeps nothing."""

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
    """Nothing is stored."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> None:
        """Nothing is to be done."""

    def get_num_new_matched_tokens(
        self, request: LlmRequest, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """There is nothing."""
        return 0, False

    def update_state_after_alloc(self, request: LlmRequest, block_ids: list[int]) -> None:
        """Nothing."""

    def request_finished(self, request: LlmRequest, cache_block_ids: list[int]) -> bool:
        """The blocks may go."""
        return False


class NoStoreWorker(KvCacheConnectorWorker):
    """Nothing is stored."""

    wakes = True

    def register_kv_caches(self, kv_cache_tensor: Tensor) -> None:
        """Nothing."""

    def register_kv_cache_layout(self, pools: Sequence[KvCachePool]) -> None:
        """Nothing."""

    def start_load_kv(self, stream: ForwardStream) -> None:
        """Nothing."""

    def wait_for_layer_load(self, layer_idx: int, stream: ForwardStream) -> None:
        """Nothing."""

    def save_kv_layer(self, layer_idx: int, stream: ForwardStream) -> None:
        """Nothing."""

    def wait_for_save(self, stream: ForwardStream) -> None:
        """Nothing."""

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Nothing began."""
        return [], []
