"""The rank's half, which TensorRT-LLM calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kvconnect.errors import UnsupportedModel
from kvconnect.integrations.trtllm.attachment import Attachment
from kvconnect.integrations.trtllm.bases import connector_class
from kvconnect.integrations.trtllm.requests import StepOrders

__all__ = []

if TYPE_CHECKING:
    from kvconnect.connector.worker import KvCacheConnectorWorker as _Base
else:
    _Base = connector_class("KvCacheConnectorWorker")


class KvConnectWorker(_Base):
    """Copies fetched blocks into the pool, and blocks that a step filled out of the pool.

    Args:
        llm_args: TensorRT-LLM's.

    Raises:
        ConfigurationError: ``KVCONNECT_CONFIG`` is missing or wrong, or there are several ranks.
    """

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._attachment = Attachment.of(llm_args)

    def register_kv_caches(self, kv_cache_tensor: Tensor) -> None:
        """Registers the pool and opens the store.

        Raises:
            ConfigurationError: the store cannot be opened.
            UnsupportedModel: the pool is of another form.
        """
        self._attachment.register(kv_cache_tensor)

    def register_kv_cache_layout(self, pools: Any) -> None:
        """Registers the pool from a description of all pools, if there is only one.

        Args:
            pools: TensorRT-LLM's ``KvCacheLayout``, or kvconnect's own `KvCachePool` s.

        Raises:
            ConfigurationError: the store cannot be opened.
            UnsupportedModel: there are several pools, or one of another form.
        """
        if isinstance(pools, Sequence):
            super().register_kv_cache_layout(pools)
        else:
            self.register_kv_caches(_single_pool(pools))

    def start_load_kv(self, stream: Any) -> None:
        """Copies the fetched blocks of this step's requests; `stream` waits for the copies."""
        orders = self._metadata
        if isinstance(orders, StepOrders):
            for request_id, block_ids in orders.loads.items():
                self._attachment.copy_in(request_id, block_ids, stream)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Does nothing: the stream waits for all layers."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Does nothing: whole blocks are copied at the end of the forward pass."""

    def wait_for_save(self, stream: Any) -> None:
        """Stages the blocks that this step filled; `stream` waits for the copies."""
        orders = self._metadata
        if isinstance(orders, StepOrders):
            for order in orders.saves:
                self._attachment.save(order, stream)

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Returns all given requests: no request has transfers in the background.

        TensorRT-LLM calls this once in each turn of its loop, after the results of a step.
        """
        self._attachment.end_turn()
        return list(finished_gen_req_ids), list(started_loading_req_ids)

    def shutdown(self) -> None:
        """Writes staged blocks and closes the store. A normal process exit does that, too."""
        self._attachment.close()


_REMEDY = (
    "kvconnect is built for the form of one tensor (register_kv_caches); set "
    "kv_cache_config.use_kv_cache_manager_v2=False, or serve a model with one attention window"
)


def _single_pool(layout: Any) -> Tensor:
    """Returns the tensor that is all of `layout`, TensorRT-LLM's ``KvCacheLayout``.

    Its form is that of `register_kv_caches`: ``[num_blocks, num_layers, kv_factor, elements]``.

    Raises:
        UnsupportedModel: there is none: several layer groups or regions, or a release whose
            description makes no tensor.
    """
    groups = tuple(layout.groups)
    regions = sum(
        len(group.regions) + len(getattr(group, "replicated_regions", ())) for group in groups
    )
    if len(groups) != 1 or regions != 1:
        raise UnsupportedModel(
            f"register_kv_cache_layout: KV in {len(groups)} layer groups and {regions} regions; "
            f"{_REMEDY}"
        )
    as_tensor = getattr(layout, "as_single_pool_tensor", None)
    pool = None if as_tensor is None else as_tensor()
    if pool is None:
        raise UnsupportedModel(
            f"register_kv_cache_layout: the pool's {type(layout).__name__} makes no tensor of it; "
            f"{_REMEDY}"
        )
    found: Tensor = pool
    return found
