"""The resource manager that the engine drives: blocks and the memory that they name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, TypedDict

import numpy as np
import torch
from torch import Tensor

from kvconnect.cache.block_manager import BlockManager
from kvconnect.cache.copier import TensorCopier
from kvconnect.cache.pool_tensor import allocate_pool, layer_buffers
from kvconnect.cache.resource_manager import BaseKVCacheManager, PinnedBlocks
from kvconnect.cache.sequence import PinHandle
from kvconnect.cache.sizing import num_primary_blocks
from kvconnect.config import KvCacheConfig
from kvconnect.errors import ConfigurationError, OutOfBlocks
from kvconnect.layout import KvCacheLayout
from kvconnect.request import (
    ExternalMatch,
    ExternalMatcher,
    LlmRequest,
    RequestState,
    ScheduledBatch,
)

__all__ = ["KVCacheManager"]

_CPU = torch.device("cpu")


class _Space(TypedDict):
    cache_salt: str | None
    lora_id: int | str | None
    extra_key: str | int | None


class KVCacheManager(BaseKVCacheManager):
    """The KV cache of one rank: the pool's memory and a `BlockManager` over it.

    A sequence of the block manager has the tokens of its request whose KV was or is being computed:
    it may lag one token behind ``request.tokens``, as the last sampled token of a request is never
    fed back. Not thread-safe: it belongs to the engine's thread.

    Args:
        config: of the cache.
        layouts: of the pools; one, so far.
        device: where the pool lies.
        num_blocks: blocks of the pool, instead of sizing by `config`.

    Attributes:
        blocks: the block manager.
        layout: of the pool.

    Raises:
        ConfigurationError: no block fits, or a setting is not supported.
    """

    supports_connector: ClassVar[bool] = True

    def __init__(
        self,
        config: KvCacheConfig,
        layouts: Sequence[KvCacheLayout],
        device: torch.device = _CPU,
        *,
        num_blocks: int | None = None,
    ) -> None:
        if len(layouts) != 1:
            raise ConfigurationError(
                f"layouts: {len(layouts)} pools are not supported yet; all layers share one"
            )
        self.layout = layouts[0]
        if num_blocks is None:
            num_blocks = num_primary_blocks(config, self.layout, device)
        self._pool = allocate_pool(self.layout, num_blocks, device)
        copier = TensorCopier(self._pool, self.layout)
        self.blocks = BlockManager(config, self.layout, num_blocks=num_blocks, copier=copier)
        self._matcher: ExternalMatcher | None = None

    # ---------------------------------------------------------------- the steps of the engine

    def prepare_resources(self, batch: ScheduledBatch) -> None:
        """Allocate what this step needs. See `BaseResourceManager.prepare_resources`.

        Raises:
            OutOfBlocks: a generating request has no next slot. It is unchanged, what stands before
                it in the batch has its slots; the engine makes room and calls again.
        """
        admitted = []
        for request in batch.context_requests:
            if self.blocks.holds(request.request_id):
                admitted.append(request)
            elif not self._admit(request):
                batch.refused_requests.append(request)
            elif request.state is RequestState.LOADING:
                batch.loading_requests.append(request)
            else:
                admitted.append(request)
        batch.context_requests[:] = admitted
        for request in batch.generation_requests:
            self._extend(request)

    def update_resources(self, batch: ScheduledBatch) -> None:
        """Publish the blocks that the requests of `batch` filled in this step."""
        for request in batch.requests:
            if self.blocks.holds(request.request_id):
                self.blocks.commit(request.request_id, self._num_valid(request))

    def free_resources(self, request: LlmRequest) -> None:
        """Publish what is valid of `request`, tail included, and let go of its blocks, if any."""
        if self.blocks.holds(request.request_id):
            self.blocks.abort(request.request_id, self._num_valid(request))

    def add_padding_request(self, request_id: int) -> None:
        """Hold a block for a request of one token, to warm up with; nothing of it is published.

        Raises:
            DuplicateRequest: the id is in use.
            OutOfBlocks: no block is free.
        """
        self.blocks.add_sequence(request_id, [0])

    # ---------------------------------------------------------------- questions

    def get_max_resource_count(self) -> int:
        """Blocks in all."""
        return self.blocks.max_blocks()

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        """See `BaseResourceManager`. The last token that `request` generates takes no slot."""
        num_tokens = request.prompt_len + request.sampling_params.max_tokens - 1
        if len(request.draft_tokens):
            num_tokens = max(num_tokens, request.num_tokens + len(request.draft_tokens))
        blocks = -(-num_tokens // self.layout.tokens_per_block)
        if not self.blocks.holds(request.request_id):
            return blocks
        return max(blocks - self.blocks.num_blocks(request.request_id), 0)

    def get_num_free_blocks(self) -> int:
        """Blocks that could be allocated now."""
        return self.blocks.num_free_blocks()

    def get_batch_cache_indices(self, requests: Sequence[LlmRequest]) -> Mapping[int, list[int]]:
        """Block ids of each request, by request id, in order of its tokens."""
        return {r.request_id: self.blocks.block_ids(r.request_id).tolist() for r in requests}

    def get_buffers(self, layer_idx: int) -> Tensor | tuple[Tensor, Tensor]:
        """The layer's KV memory; see `BaseKVCacheManager`. Shares the pool's memory."""
        return layer_buffers(self._pool, self.layout, layer_idx)

    # ---------------------------------------------------------------- for connectors

    def set_external_matcher(self, matcher: ExternalMatcher) -> None:
        """Ask `matcher` during admission from now on."""
        self._matcher = matcher

    def pool_tensor(self, group: int = 0) -> Tensor:
        """The pool, ``[num_blocks, num_layers, kv_factor, elements]``, contiguous."""
        return self._pool

    def detach(self, request: LlmRequest, first_block: int) -> PinnedBlocks:
        """See `BlockManager.detach`."""
        return self.blocks.detach(request.request_id, first_block)

    def pin(self, request: LlmRequest) -> PinnedBlocks:
        """Keep the blocks that `request` holds now, also after it let go of them."""
        return self.blocks.pin(request.request_id)

    def unpin(self, handle: PinnedBlocks) -> None:
        """Let go of what `handle` holds."""
        if not isinstance(handle, PinHandle):
            raise ConfigurationError(f"handle: {handle!r} was not made by this manager")
        self.blocks.unpin(handle)

    def get_priorities(self, request: LlmRequest, start: int = 0) -> list[int]:
        """Retention priority of each block of `request` from block `start` on."""
        return self.blocks.priorities(request.request_id, start)

    def rewind(self, request: LlmRequest, num_tokens: int) -> None:
        """The sequence of `request` loses its last `num_tokens` tokens (rejected drafts)."""
        self.blocks.rewind(request.request_id, num_tokens)

    # ---------------------------------------------------------------- inside

    def _admit(self, request: LlmRequest) -> bool:
        space: _Space = {
            "cache_salt": request.cache_salt,
            "lora_id": request.lora_id,
            "extra_key": request.extra_key,
        }
        tokens = request.tokens.view
        matched = self.blocks.foretell(tokens, **space)
        if matched is None:
            return False
        external = ExternalMatch()
        if self._matcher is not None:
            external = self._matcher.match_external(request, matched)
        try:
            allocation = self.blocks.add_sequence(
                request.request_id,
                tokens,
                **space,
                retention=request.retention,
                keys=request.key_chain,
                max_matched=external.position if external.num_tokens else None,
            )
        except OutOfBlocks:
            # Matching less, because the store reaches further, shares fewer blocks with others.
            return False
        request.reused_device_tokens = allocation.matched_tokens
        request.num_computed_tokens = allocation.matched_tokens
        request.num_external_tokens = external.end if external.num_tokens else 0
        loading = external.num_tokens > 0 and external.is_async
        request.state = RequestState.LOADING if loading else RequestState.CONTEXT
        if self._matcher is not None:
            ids = allocation.block_ids.tolist()
            self._matcher.blocks_allocated(request, ids, [ids])
        return True

    def _extend(self, request: LlmRequest) -> None:
        self._forget_rejected(request)
        held = self.blocks.num_tokens(request.request_id)
        missing = request.tokens.view[held:]
        self.blocks.append_tokens(
            request.request_id, np.concatenate([missing, request.draft_tokens])
        )

    def _forget_rejected(self, request: LlmRequest) -> None:
        # Drafts that were appended for an earlier step and not taken are no tokens of the request.
        start = request.num_computed_tokens
        held = self.blocks.tokens(request.request_id, start)
        wanted = request.tokens.view[start : start + len(held)]
        differs = held[: len(wanted)] != wanted
        agreed = int(differs.argmax()) if differs.any() else len(wanted)
        if agreed < len(held):
            self.blocks.rewind(request.request_id, len(held) - agreed)

    def _num_valid(self, request: LlmRequest) -> int:
        return min(request.num_computed_tokens, self.blocks.num_tokens(request.request_id))
