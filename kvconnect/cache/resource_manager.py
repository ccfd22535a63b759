"""The interface of a KV cache manager that an engine drives; subclass it for one of your own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from kvconnect.cache.pool.events import KvCacheEvent
from kvconnect.config import KvCacheConfig
from kvconnect.errors import ConfigurationError
from kvconnect.layout import KvCacheLayout
from kvconnect.request import ExternalMatcher, LlmRequest, ScheduledBatch
from kvconnect.tokens import TokenArray


class PinnedBlocks:
    """An opaque handle of blocks that stay until it is passed to `BaseKVCacheManager.unpin`."""

    __slots__ = ()


class BaseResourceManager(ABC):
    """The resources that requests need while they run. The methods are TensorRT-LLM's."""

    @abstractmethod
    def prepare_resources(self, batch: ScheduledBatch) -> None:
        """Allocates the blocks of this step; called before the forward pass.

        Requests in `batch.context_requests` that hold no blocks yet are admitted: they get blocks
        for the whole prompt, and ``num_computed_tokens`` is set to the reused tokens. Generating
        requests get the slot of their next token. `ScheduledBatch` describes which requests are
        moved to its other lists. No other method allocates blocks for a step.
        """

    @abstractmethod
    def update_resources(self, batch: ScheduledBatch) -> None:
        """Publishes the blocks that the step filled. ``num_computed_tokens`` is up to date."""

    @abstractmethod
    def free_resources(self, request: LlmRequest) -> None:
        """Publishes the first ``num_computed_tokens`` of `request`, and releases its blocks.

        `request` has ended or is preempted.
        """

    @abstractmethod
    def get_max_resource_count(self) -> int:
        """Returns the number of all blocks."""

    @abstractmethod
    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        """Returns exactly how many blocks `request` still needs to run to its ``max_tokens``.

        Reuse is not counted: the result is the blocks at the end of `request` minus those that it
        holds now. With several pools, the result is for group 0.
        """

    def needed_blocks(self, request: LlmRequest) -> tuple[int, ...]:
        """Returns for each pool group the most blocks `request` will hold, minus those held now."""
        return (self.get_needed_resource_to_completion(request),)


class BaseKVCacheManager(BaseResourceManager):
    """A resource manager for KV blocks, with the queries of the engine and of connectors.

    The methods from `set_external_matcher` on serve connectors. A manager without them has
    ``supports_connector = False``, and the engine then refuses to attach a connector. A manager
    without pools for sliding windows (``supports_window_pools = False``) gets one layout for all
    layers; windows are then masks only. A manager that keeps no snapshots of recurrent states
    (``supports_states = False``) gets no layout of them, and must reuse no prefix for models that
    have some. With ``has_windows`` a loaded prefix can be reused as a whole, not a part of it. A
    manager that sets a request's ``load_end`` and ``loaded_from`` for a match that
    `overlaps` declares ``overlaps_loads = True``. Requests of another manager wait for their loads.

    An error of `needed_blocks` for a waiting request ends that request and no other. So does an
    error of `prepare_resources` for a batch of one request that is to be admitted. (If a batch of
    several raises, those whose state is not ``QUEUED`` any more are freed, and each is admitted
    again alone.) A manager sets ``raises_for_requests = False`` if such an error may leave the
    blocks of other requests wrong. Such an error then ends the engine, as any other error of the
    manager does: the content of blocks is unknown, and a wrong token is worse than an end.
    """

    raises_for_requests: ClassVar[bool] = True
    supports_connector: ClassVar[bool] = False
    supports_window_pools: ClassVar[bool] = False
    supports_states: ClassVar[bool] = False
    overlaps_loads: ClassVar[bool] = False
    has_windows: bool = False

    @abstractmethod
    def get_batch_cache_indices(self, requests: Sequence[LlmRequest]) -> Mapping[int, list[int]]:
        """Maps request ids to the block ids of group 0, in order of the request's tokens."""

    def get_group_cache_indices(
        self, requests: Sequence[LlmRequest], group: int
    ) -> Mapping[int, list[int]]:
        """Maps request ids to the block ids of one pool group; -1 for a block that is not held."""
        if group != 0:
            raise ConfigurationError(f"group: {group} does not exist; there is only group 0")
        return self.get_batch_cache_indices(requests)

    @abstractmethod
    def get_buffers(self, layer_idx: int) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the layer's KV memory, a view ``[num_blocks, 2, T, num_kv_heads, head_dim]``.

        If key and value dimensions differ, it returns two views
        ``[num_blocks, T, num_kv_heads, dim]``, keys and values.
        """

    @abstractmethod
    def get_num_free_blocks(self) -> int:
        """Returns how many blocks can be allocated now; with several pools, of group 0."""

    def ensure_free(self, needs: Sequence[int]) -> bool:
        """Returns whether each pool group can supply ``needs[group]`` blocks now.

        May move memory between pools for that. If the result is False, nothing changed.
        """
        return needs[0] <= self.get_num_free_blocks()

    def could_hold(self, prompt_len: int, max_tokens: int) -> bool:
        """Returns whether the cache, if no other request holds a block, can run such a request.

        If not, the engine refuses the request when it arrives. The default, for managers that do
        not know, is True. May be called from any thread.
        """
        return True

    def reusable_tokens(self, request: LlmRequest, published: int = 0) -> int:
        """Returns how many leading tokens `request` would reuse if it were admitted.

        Changes nothing; `request` holds no blocks. A manager that reuses nothing returns 0, as by
        default: then no request waits for another that computes the same tokens.

        Args:
            request: a waiting request.
            published: this many first tokens, in whole blocks, are counted as published.
        """
        return 0

    def nearest_cached(self, request: LlmRequest) -> tuple[int, TokenArray] | None:
        """Returns where the prompt of `request` leaves what is cached, and the tokens there.

        That is the position of the first token that differs, within the namespace of `request`, and
        at most a block of cached tokens from there on. Changes nothing. Returns ``None``, the
        default, if the cache has a prefix of the prompt and nothing that continues it otherwise.
        """
        return None

    def expect_chunks(self, max_chunk_tokens: int) -> None:
        """Sets the most prompt tokens that a request computes in one step; called at the start.

        Pools of sliding windows then allocate blocks for so many tokens at a time.
        """

    def add_padding_request(self, request_id: int) -> None:
        """Allocates a block for a request of one token, for warm-up. The block is never published.

        The engine never calls this method, and a manager need not implement it.

        Raises:
            ConfigurationError: the manager does not implement it.
        """
        raise ConfigurationError(
            f"{type(self).__name__} has no padding requests; override add_padding_request"
        )

    # ---------------------------------------------------------------- beside loads

    # For managers with ``overlaps_loads``. The defaults suit one that allocates all blocks of a
    # prompt at its admission. One with pools of windows allocates there what the load fills, and
    # keeps the matched blocks from which computing begins. Of recurrent states the load fills the
    # block at its end; computing ends a chunk there, unless it continues from the loaded states.

    def fits_beside(self, request: LlmRequest, position: int, end: int) -> bool:
        """Returns whether `request` may compute from `position` on beside a load up to `end`.

        If not, it waits for its load. `request` holds no blocks.
        """
        return True

    def needed_beside(self, request: LlmRequest) -> tuple[int, ...]:
        """Returns for each pool group how many blocks computing adds to `needed_blocks`.

        `request` loads and has computed nothing beside its load. Once `reserve_beside` has
        allocated blocks for it, the result is zeros, and `needed_blocks` includes them.
        """
        return (0,)

    def reserve_beside(self, request: LlmRequest, num_tokens: int) -> bool:
        """Allocates the blocks that `request` needs to compute up to `num_tokens` beside its load.

        Returns False, and changes nothing, if there are not enough.
        """
        return True

    # ---------------------------------------------------------------- recurrent states

    # The engine computes each sequence in a running slot of its own, and calls, in this order:
    #
    # 1. before the first chunk that begins after an admission, and if it loads, once the load has
    #    ended: `state_restore`. It copies the block that is returned to the running slot. If the
    #    chunk begins at 0, it zeroes the slot instead. If it may compute beside the load, it does
    #    so in the step of its admission, too.
    # 2. when it plans a chunk: `next_state_end`. The chunk must not go beyond that position.
    # 3. for a chunk that ends there, before `update_resources`: `state_snapshot`. After the forward
    #    pass it copies the running slot to the block that is returned, if there is one. A call
    #    before the connector's step lets a connector save the block in that step.
    #
    # The copy of 1 is launched before the next call of this manager, and that of 3 before the next
    # `update_resources`, on the stream of the forward pass; the block may have another owner
    # afterwards. For drafts that may be rejected the engine keeps a second copy of the states for
    # the step, since the manager has states at the ends of blocks only; a step with drafts ends
    # before the next snapshot.

    def get_states(self, layer_idx: int) -> Mapping[str, Tensor]:
        """Returns the state tensors of a recurrent layer by name, ``[num_state_blocks, *shape]``.

        They are views of the pool.

        Raises:
            ConfigurationError: the layer has no states.
        """
        raise ConfigurationError(f"{type(self).__name__} has no states of layer {layer_idx}")

    def next_state_end(self, request: LlmRequest, computed: int) -> int | None:
        """Returns the first position after `computed` at which a snapshot is due.

        The chunk that begins at `computed` must not go beyond it. Changes nothing. The result is a
        multiple of ``tokens_per_block``, and may lie beyond the tokens of `request`. Without states
        it is None, as by default.
        """
        return None

    def state_restore(self, request: LlmRequest, computed: int) -> int | None:
        """Returns the block with the states after the first `computed` tokens, or None.

        `computed` is where the next chunk begins. After an admission or a load the result is None
        only if that is 0. Later it is None unless the last snapshot was taken at `computed`.
        `request` holds the block until its next snapshot; or until this call, if it may compute
        beside a load that ends behind `computed`.
        """
        return None

    def state_snapshot(self, request: LlmRequest, position: int) -> int | None:
        """Allocates the block for the states of `request` at `position`, or returns None.

        None means that no snapshot is to be taken: no block is free, or `position` is not the end
        of a block, or has one already. At the end of a load it is the block that the load fills,
        which no worker writes to any more. The `update_resources` after exactly `position` tokens
        publishes the block, which must be written before that. Releases the block of the snapshot
        before. May reclaim published blocks and order copies; never fails for want of blocks.

        Raises:
            ConfigurationError: (a ``ValueError``) `position` was committed before, or is beyond the
                tokens of `request`.
        """
        return None

    def reset(self) -> bool:
        """Drops every cached block. Returns False, the default, if nothing was dropped."""
        return False

    def take_events(self) -> list[KvCacheEvent]:
        """Removes and returns the events since the last call, oldest first.

        May be called from any thread.
        """
        return []

    def set_external_matcher(self, matcher: ExternalMatcher) -> None:
        """Makes `prepare_resources` call `matcher` for each new request from now on.

        `matcher` is a weak proxy: the manager may keep and call it, but not hash it, and calls it
        only while the engine lives.
        """
        raise self._no_connector()

    def pool_tensor(self, group: int = 0) -> Tensor:
        """Returns the whole pool of a group, as the flat view that connectors register."""
        raise self._no_connector()

    def detach(self, request: LlmRequest, first_block: int) -> PinnedBlocks:
        """Detaches the blocks from `first_block` on from `request`, which gets fresh ones.

        The handle holds the detached blocks.

        Raises:
            OutOfBlocks: there are not enough blocks; nothing changed.
        """
        raise self._no_connector()

    def pin(self, request: LlmRequest) -> PinnedBlocks:
        """Pins the blocks that `request` holds now; they stay after `request` releases them."""
        raise self._no_connector()

    def unpin(self, handle: PinnedBlocks) -> None:
        """Releases the blocks that `handle` holds."""
        raise self._no_connector()

    def publish_ended(self, request: LlmRequest) -> None:
        """Publishes the valid tokens of an ended `request` whose blocks are still being saved.

        The request holds its blocks until `free_resources` is called. Does nothing by default.
        """

    def get_priorities(self, request: LlmRequest, start: int = 0) -> list[int]:
        """Returns the retention priority of each block of `request` from block `start` on."""
        raise self._no_connector()

    def rewind(self, request: LlmRequest, num_tokens: int) -> None:
        """Drops the last `num_tokens` tokens of `request` (rejected drafts)."""
        raise self._no_connector()

    def _no_connector(self) -> ConfigurationError:
        return ConfigurationError(
            f"{type(self).__name__} does not support connectors (supports_connector is False)"
        )


KVCacheManagerFactory: TypeAlias = Callable[
    [KvCacheConfig, Sequence[KvCacheLayout], torch.device], BaseKVCacheManager
]
"""Makes a cache manager of its arguments; the class `KVCacheManager` is such a factory."""
