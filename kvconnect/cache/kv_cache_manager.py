"""The resource manager that the engine drives: a block manager and the memory of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kvconnect.cache.admission.demand import fits_beside, peak_of, peak_of_new
from kvconnect.cache.admission.prompt import Prompt
from kvconnect.cache.block_manager import BlockManager
from kvconnect.cache.memory.copier import TensorCopier
from kvconnect.cache.memory.pool_tensor import CacheMemory
from kvconnect.cache.memory.sizing import pool_sizes
from kvconnect.cache.pool.events import KvCacheEvent
from kvconnect.cache.resource_manager import BaseKVCacheManager, PinnedBlocks
from kvconnect.cache.sequence.sequence import PinHandle
from kvconnect.config import KvCacheConfig
from kvconnect.errors import ConfigurationError, OutOfBlocks, SequencesLive
from kvconnect.layout import KvCacheLayout
from kvconnect.request import (
    ExternalMatch,
    ExternalMatcher,
    LlmRequest,
    RequestState,
    ScheduledBatch,
)
from kvconnect.tokens import TokenArray, common_length

_CPU = torch.device("cpu")

CopierFactory = Callable[
    [Sequence[Tensor], Sequence[Tensor | None], Sequence[KvCacheLayout]], TensorCopier
]


class KVCacheManager(BaseKVCacheManager):
    """The KV cache of one rank: the memory of all pools and a `BlockManager` over it.

    A sequence of the block manager has the tokens of its request whose KV was or is being computed.
    That may be one token less than ``request.tokens``, as the last sampled token of a request is
    never fed back. Not thread-safe: only the engine's thread may call it.

    Args:
        config: the settings of the cache.
        layouts: the layouts of the pools, one per pool group.
        device: the device of the pools.
        num_blocks: the blocks of each pool, not sized by `config`; pools exchange no memory then.
        make_copier: makes the copier of the pools, the host pools and their layouts.

    Attributes:
        blocks: the block manager.
        sizes: the sizes of the pools.
        layouts: the layouts in group order: full attention, then large windows to small.

    Raises:
        ConfigurationError: no block fits, or a setting does not fit the pools.
    """

    # After an error during the copies of an admission, the content of blocks is not known.
    raises_for_requests: ClassVar[bool] = False
    supports_connector: ClassVar[bool] = True
    supports_window_pools: ClassVar[bool] = True
    supports_states = True
    overlaps_loads: ClassVar[bool] = True

    def __init__(
        self,
        config: KvCacheConfig,
        layouts: Sequence[KvCacheLayout],
        device: torch.device = _CPU,
        *,
        num_blocks: int | Mapping[int | None, int] | None = None,
        make_copier: CopierFactory = TensorCopier,
    ) -> None:
        self.sizes = sizes = pool_sizes(config, layouts, num_blocks, device=device)
        self.layouts = sizes.layouts
        self.has_windows = any(one.window is not None for one in self.layouts)
        self._memory = memory = CacheMemory(sizes, device)
        self._copier = make_copier(memory.pools, memory.host_pools, sizes.layouts)
        self.blocks = BlockManager(config, layouts, copier=self._copier, sizes=sizes)
        self._config = config
        self._tokens_per_block = config.tokens_per_block
        self._max_chunk: int | None = None
        self._matcher: ExternalMatcher | None = None

    # ---------------------------------------------------------------- the steps of the engine

    def prepare_resources(self, batch: ScheduledBatch) -> None:
        """Allocates the blocks of this step, as `BaseResourceManager.prepare_resources` describes.

        Raises:
            OutOfBlocks: a running request has no next slot, or no blocks of a window pool for its
                next chunk. That request is unchanged, and the requests before it in the batch have
                their slots. The engine frees blocks and calls again.
        """
        with self._copier.together():
            self._prepare(batch)

    def _prepare(self, batch: ScheduledBatch) -> None:
        admitted = []
        for request in batch.context_requests:
            if self.blocks.holds(request.request_id):
                self._reserve_chunk(request)
                admitted.append(request)
            elif self._admit(request, batch):
                loads = request.state is RequestState.LOADING
                (batch.loading_requests if loads else admitted).append(request)
        batch.context_requests[:] = admitted
        for request in batch.generation_requests:
            self._extend(request)

    def update_resources(self, batch: ScheduledBatch) -> None:
        """Publishes the blocks that the requests of `batch` filled in this step."""
        for request in batch.requests:
            if self.blocks.holds(request.request_id):
                self.blocks.commit(request.request_id, self._num_valid(request))

    def free_resources(self, request: LlmRequest) -> None:
        """Publishes the valid tokens of `request`, tail included; releases its blocks, if any."""
        if self.blocks.holds(request.request_id):
            self.blocks.abort(request.request_id, self._num_valid(request))

    def publish_ended(self, request: LlmRequest) -> None:
        """Publishes the valid tokens of `request`, tail included; see `BaseKVCacheManager`."""
        self.blocks.publish_ended(request.request_id, self._num_valid(request))

    def add_padding_request(self, request_id: int) -> None:
        """Allocates a block for a request of one token, for warm-up. The block is never published.

        Raises:
            DuplicateRequest: `request_id` is in use.
            OutOfBlocks: no block is free.
        """
        self.blocks.add_sequence(request_id, [0])

    # ---------------------------------------------------------------- questions

    def get_max_resource_count(self) -> int:
        """Returns the number of all blocks of group 0."""
        return self.blocks.max_blocks()

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        """Returns how many blocks of group 0 `request` still needs, as `BaseResourceManager` says.

        The last token that `request` generates needs no slot.
        """
        return self.needed_blocks(request)[0]

    def needed_blocks(self, request: LlmRequest) -> tuple[int, ...]:
        """Returns for each pool group how many blocks `request` will need beyond those it holds.

        That is the most that it holds at any time from now on. For a prompt in chunks, the worst
        way to cut it counts.
        """
        return tuple(self._needed(request, group) for group in range(len(self.layouts)))

    def could_hold(self, prompt_len: int, max_tokens: int) -> bool:
        """Returns whether a new request fits into the empty cache; see `BaseKVCacheManager`."""
        chunk = self._max_chunk
        peaks = [peak_of_new(one, prompt_len, max_tokens, chunk) for one in self.layouts]
        return self.sizes.could_supply(peaks)

    def fits_beside(self, request: LlmRequest, position: int, end: int) -> bool:
        """Returns whether `request` may compute beside a load; see `BaseKVCacheManager`."""
        where, chunk = (position, end), self._max_chunk
        fits = all(fits_beside(request, layout, where, chunk) for layout in self.layouts)
        if not (fits and self.has_windows):
            return fits
        prompt = Prompt.of(request.tokens.view, request.namespace.id)
        prompt = prompt.filled_by(ExternalMatch(position, end - position, overlaps=True), chunk)
        return self.blocks.predict_match(prompt) is not None

    def needed_beside(self, request: LlmRequest) -> tuple[int, ...]:
        """Returns the blocks that computing beside a load needs; see `BaseKVCacheManager`."""
        ahead = self.blocks.num_ahead(request.request_id)
        return (0,) * len(ahead) if self.blocks.has_begun(request.request_id) else ahead

    def reserve_beside(self, request: LlmRequest, num_tokens: int) -> bool:
        """Allocates blocks to compute beside a load; see `BaseKVCacheManager`."""
        with self._copier.together(), suppress(OutOfBlocks):
            self.blocks.reserve(request.request_id, num_tokens)
            return True
        return False

    def reusable_tokens(self, request: LlmRequest, published: int = 0) -> int:
        """Returns how many leading tokens `request` would reuse; see `BaseKVCacheManager`."""
        if not self._config.enable_block_reuse or not request.may_reuse:
            return 0
        most = request.num_tokens - 1  # the last token is computed for its logits
        if not self._config.enable_partial_reuse:
            most -= most % self._tokens_per_block
        matched = self.blocks.match(
            request.tokens.view,
            cache_salt=request.cache_salt,
            lora_id=request.lora_id,
            extra_key=request.extra_key,
        )
        return max(matched, min(published, most))

    def nearest_cached(self, request: LlmRequest) -> tuple[int, TokenArray] | None:
        """Returns where `request` leaves what is cached; see `BaseKVCacheManager`."""
        prompt = Prompt.of(request.tokens.view[: request.prompt_len], request.namespace.id)
        return self.blocks.nearest(prompt)

    def expect_chunks(self, max_chunk_tokens: int) -> None:
        """Sets the most prompt tokens of a request that one step computes."""
        self._max_chunk = max_chunk_tokens

    def ensure_free(self, needs: Sequence[int]) -> bool:
        """Makes ``needs[group]`` blocks of each pool group free; False if not possible."""
        with self._copier.together():
            return self.blocks.ensure_free(needs)

    def reset(self) -> bool:
        """Drops all cached blocks. Returns False while a sequence or a pin holds blocks."""
        with suppress(SequencesLive):
            self.blocks.reset()
            return True
        return False

    def take_events(self) -> list[KvCacheEvent]:
        """Removes and returns the events since the last call. May be called from any thread."""
        return self.blocks.take_events()

    def get_num_free_blocks(self) -> int:
        """Returns how many blocks of group 0 can be allocated now."""
        return self.blocks.num_free_blocks()

    def get_batch_cache_indices(self, requests: Sequence[LlmRequest]) -> Mapping[int, list[int]]:
        """Maps request ids to the block ids of group 0, in order of the request's tokens."""
        return self.get_group_cache_indices(requests, 0)

    def get_group_cache_indices(
        self, requests: Sequence[LlmRequest], group: int
    ) -> Mapping[int, list[int]]:
        """Maps request ids to the block ids of pool group `group`, in order of the tokens.

        -1 stands for a block before the window, and for one that is not reserved yet.
        """
        return {
            request.request_id: self.blocks.group_block_ids(request.request_id, group).tolist()
            for request in requests
        }

    def get_buffers(self, layer_idx: int) -> Tensor | tuple[Tensor, Tensor]:
        """The layer's KV memory; see `BaseKVCacheManager`. Shares the pool's memory."""
        return self._memory.buffers(layer_idx)

    # ---------------------------------------------------------------- recurrent states

    def get_states(self, layer_idx: int) -> Mapping[str, Tensor]:
        """Returns the state tensors of a recurrent layer; see `BaseKVCacheManager`."""
        return self._memory.states(layer_idx)

    def next_state_end(self, request: LlmRequest, computed: int) -> int | None:
        """Returns where the chunk that begins at `computed` must end at the latest, or None."""
        return self.blocks.next_state_end(request.request_id, computed)

    def state_restore(self, request: LlmRequest, computed: int) -> int | None:
        """Returns the block with the states at `computed`, or None; see `BaseKVCacheManager`."""
        return self.blocks.state_restore(request.request_id, computed)

    def state_snapshot(self, request: LlmRequest, position: int) -> int | None:
        """Returns the block for the states at `position`; see `BaseKVCacheManager`.

        A request that generates nothing ends before its last token is committed. There is no
        snapshot behind that token then, and the request keeps the one before.
        """
        if request.sampling_params.max_tokens == 0 and position >= request.prompt_len:
            return None
        with self._copier.together():
            return self.blocks.state_snapshot(request.request_id, position)

    # ---------------------------------------------------------------- for connectors

    def set_external_matcher(self, matcher: ExternalMatcher) -> None:
        """Makes `prepare_resources` call `matcher` for each new request from now on."""
        self._matcher = matcher

    def pool_tensor(self, group: int = 0) -> Tensor:
        """Returns a group's pool, contiguous ``[num_blocks, num_layers, kv_factor, elements]``.

        If pools exchange memory, each of them is a view of the whole arena.
        """
        return self._memory.pool_tensor(group)

    def detach(self, request: LlmRequest, first_block: int) -> PinnedBlocks:
        """Detaches the blocks from `first_block` on from `request`, which gets fresh ones.

        Raises:
            ConfigurationError, OutOfBlocks: as `BlockManager.detach`; nothing changed.
        """
        return self.blocks.detach(request.request_id, first_block)

    def pin(self, request: LlmRequest) -> PinnedBlocks:
        """Pins the blocks that `request` holds now; they stay after `request` releases them."""
        return self.blocks.pin(request.request_id)

    def unpin(self, handle: PinnedBlocks) -> None:
        """Releases the blocks that `handle` holds."""
        if not isinstance(handle, PinHandle):
            raise ConfigurationError(f"handle: {handle!r} was not made by this manager")
        self.blocks.unpin(handle)

    def get_priorities(self, request: LlmRequest, start: int = 0) -> list[int]:
        """Returns the retention priority of each block of `request` from block `start` on."""
        return self.blocks.priorities(request.request_id, start)

    def rewind(self, request: LlmRequest, num_tokens: int) -> None:
        """Drops the last `num_tokens` tokens of `request` (rejected drafts)."""
        self.blocks.rewind(request.request_id, num_tokens)

    # ---------------------------------------------------------------- inside

    def _admit(self, request: LlmRequest, batch: ScheduledBatch) -> bool:
        """Admits `request`, or appends it to the refused or deferred requests of `batch`."""
        chunk, most = self._max_chunk, None if request.may_reuse else 0
        prompt = Prompt.of(request.tokens.view, request.namespace.id)
        prompt = prompt.within(max_matched=most, first_chunk=chunk)
        external = self._match_external(request, prompt)
        if external is None:
            batch.refused_requests.append(request)
            return False
        if external.deferred:
            batch.deferred_requests.append(request)
            return False
        if external.num_tokens:
            prompt = prompt.filled_by(external, chunk)
        onboarded = self._copier.onboarded_tokens
        try:
            sequence = self.blocks.admit(
                request.request_id, prompt, retention=request.retention, keys=request.key_chain
            )
        except OutOfBlocks:
            # It may fit without the store, with whose match fewer blocks are shared on the device.
            batch.refused_requests.append(request)
            return False
        matched = sequence.matched
        request.reused_device_tokens = request.num_computed_tokens = matched
        request.reused_host_tokens = min(self._copier.onboarded_tokens - onboarded, matched)
        if sequence.no_state_tokens:
            begin = max(matched, external.end if external.num_tokens else 0)
            request.account.lack_states(begin + sequence.no_state_tokens)
        loading = external.num_tokens > 0 and external.is_async
        request.forget_load()
        request.num_external_tokens = external.end if external.num_tokens else 0
        if loading and external.overlaps:
            request.num_external_tokens = 0
            request.load_end = request.loaded_from = external.end
            request.load_follows = external.follows
        request.state = RequestState.LOADING if loading else RequestState.CONTEXT
        if self._matcher is not None:
            self._matcher.blocks_allocated(request, sequence.held[0].ids.tolist())
        return True

    def _match_external(self, request: LlmRequest, prompt: Prompt) -> ExternalMatch | None:
        """Returns the store's match beyond the device's; ``None`` if there is no room for it."""
        if self._matcher is None or not request.may_reuse:
            return ExternalMatch()
        matched = self.blocks.predict_match(prompt, request.key_chain)
        return None if matched is None else self._matcher.match_external(request, matched)

    def _reserve_chunk(self, request: LlmRequest) -> None:
        num_tokens = self.blocks.num_tokens(request.request_id)
        if self._max_chunk is not None:
            start = max(request.num_computed_tokens, request.num_external_tokens)
            num_tokens = min(num_tokens, start + self._max_chunk)
        if request.load_end:
            num_tokens = min(num_tokens, request.joins_load_at)
        self.blocks.reserve(request.request_id, num_tokens)

    def _needed(self, request: LlmRequest, group: int) -> int:
        peak = peak_of(request, self.layouts[group], self._max_chunk)
        if self.blocks.holds(request.request_id):
            if self.blocks.has_begun(request.request_id):
                peak += self.blocks.num_ahead(request.request_id)[group]
            peak -= self.blocks.num_blocks(request.request_id, group)
        return max(peak, 0)

    def _extend(self, request: LlmRequest) -> None:
        self._forget_rejected(request)
        missing = request.tokens.view[self.blocks.num_tokens(request.request_id) :]
        added = np.concatenate([missing, request.draft_tokens])
        self.blocks.append_tokens(request.request_id, added)

    def _forget_rejected(self, request: LlmRequest) -> None:
        # Rejected drafts of an earlier step are in the sequence, but not in the request's tokens.
        start = request.num_computed_tokens
        held = self.blocks.tokens(request.request_id, start)
        agreed = common_length(held, request.tokens.view[start:])
        if agreed < len(held):
            self.blocks.rewind(request.request_id, len(held) - agreed)

    def _num_valid(self, request: LlmRequest) -> int:
        return min(request.num_computed_tokens, self.blocks.num_tokens(request.request_id))
