"""The rank's half, called by TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kvconnect.integrations.trtllm.attachment import Attachment
from kvconnect.integrations.trtllm.bases import connector_class
from kvconnect.integrations.trtllm.layouts import single_pool
from kvconnect.integrations.trtllm.messages import StepOrders

if TYPE_CHECKING:
    from kvconnect.connector.worker import KvCacheConnectorWorker as _Base
else:
    _Base = connector_class("KvCacheConnectorWorker")

__all__ = ["KvConnectWorker"]


class KvConnectWorker(_Base):
    """Copies fetched blocks into the pool, and what a step filled out of it.

    Args:
        llm_args: TensorRT-LLM's.

    Raises:
        ConfigurationError: ``KVCONNECT_CONFIG`` is missing or wrong, or there are several ranks.
    """

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._attachment = Attachment.of(llm_args)

    def register_kv_caches(self, kv_cache_tensor: Tensor) -> None:
        """Takes the pool, and opens the store.

        Raises:
            ConfigurationError: the store cannot be opened.
            UnsupportedModel: the pool is of another form.
        """
        self._attachment.register(kv_cache_tensor)

    def register_kv_cache_layout(self, pools: Any) -> None:
        """Takes the pool from a description of all of them, if there is one.

        Args:
            pools: TensorRT-LLM's ``KvCacheLayout``, or kvconnect's own `KvCachePool` s.

        Raises:
            ConfigurationError: the store cannot be opened.
            UnsupportedModel: there are several pools, or one of another form.
        """
        if isinstance(pools, Sequence):
            super().register_kv_cache_layout(pools)
        else:
            self.register_kv_caches(single_pool(pools))

    def start_load_kv(self, stream: Any) -> None:
        """Copy what was fetched for this step's requests; `stream` waits for it."""
        orders = self._metadata
        if isinstance(orders, StepOrders):
            for load in orders.loads:
                self._attachment.copy_in(load.request_id, load.block_ids, stream)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Nothing: the stream waits for all layers."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Nothing: whole blocks are copied at the end of the forward pass."""

    def wait_for_save(self, stream: Any) -> None:
        """Stage the blocks that this step filled; `stream` waits for the copies."""
        orders = self._metadata
        if isinstance(orders, StepOrders):
            for order in orders.saves:
                self._attachment.save(order, stream)

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Whatever was begun has ended: nothing goes on in the background of a request."""
        return list(finished_gen_req_ids), list(started_loading_req_ids)

    def shutdown(self) -> None:
        """Write what is staged, and let go of the store; also done when the process exits."""
        self._attachment.close()
