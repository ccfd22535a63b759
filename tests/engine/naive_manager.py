"""A KV cache manager in its simplest form: blocks from a list, nothing is ever reused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvconnect import KvCacheConfig
from kvconnect.cache.resource_manager import BaseKVCacheManager
from kvconnect.layout import KvCacheLayout
from kvconnect.request import LlmRequest, RequestState, ScheduledBatch


class NaiveManager(BaseKVCacheManager):
    def __init__(
        self, config: KvCacheConfig, layouts: Sequence[KvCacheLayout], device: torch.device
    ) -> None:
        (self._layout,) = layouts
        self._size = config.tokens_per_block
        self._count = -(-(config.max_tokens or 4096) // self._size)
        shape = self._layout.flat_shape(self._count)
        # Nothing is promised about memory that was never written: as bad as it can be.
        self.pool = torch.full(shape, torch.nan, dtype=self._layout.dtype, device=device)
        self._free = list(range(self._count))
        self._held: dict[int, list[int]] = {}

    def prepare_resources(self, batch: ScheduledBatch) -> None:
        for request in batch.context_requests:
            if request.state is RequestState.QUEUED:
                self._held[request.request_id] = []
                request.state = RequestState.CONTEXT
                request.num_computed_tokens = 0
        for request in batch.requests:
            held = self._held[request.request_id]
            while len(held) * self._size < request.num_tokens:
                held.append(self._free.pop())

    def update_resources(self, batch: ScheduledBatch) -> None:
        pass

    def free_resources(self, request: LlmRequest) -> None:
        self._free += self._held.pop(request.request_id)

    def get_max_resource_count(self) -> int:
        return self._count

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        longest = request.prompt_len + request.sampling_params.max_tokens - 1
        return -(-longest // self._size) - len(self._held.get(request.request_id, ()))

    def get_batch_cache_indices(self, requests: Sequence[LlmRequest]) -> Mapping[int, list[int]]:
        return {request.request_id: self._held[request.request_id] for request in requests}

    def get_buffers(self, layer_idx: int) -> Tensor | tuple[Tensor, Tensor]:
        layout, layer = self._layout, self.pool[:, layer_idx]
        shape = (self._count, self._size, layout.num_kv_heads)
        if layout.kv_factor == 2:
            return layer.view(self._count, 2, *shape[1:], layout.key_dim)
        keys = self._size * layout.num_kv_heads * layout.key_dim
        return (
            layer[:, 0, :keys].unflatten(1, (*shape[1:], layout.key_dim)),
            layer[:, 0, keys:].unflatten(1, (*shape[1:], layout.value_dim)),
        )

    def get_num_free_blocks(self) -> int:
        return len(self._free)
