"""The face of a KV cache manager that an engine drives; subclass it to bring your own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from kvconnect.cache.pool.events import KvCacheEvent
from kvconnect.cache.sequence.pinned_blocks import PinnedBlocks
from kvconnect.config import KvCacheConfig
from kvconnect.errors import ConfigurationError
from kvconnect.layout import KvCacheLayout
from kvconnect.request import ExternalMatcher, LlmRequest, ScheduledBatch

__all__ = ["BaseKVCacheManager", "BaseResourceManager", "KVCacheManagerFactory", "PinnedBlocks"]


class BaseResourceManager(ABC):
    """Resources that requests need while they run. Methods and meaning are TensorRT-LLM's."""

    @abstractmethod
    def prepare_resources(self, batch: ScheduledBatch) -> None:
        """Allocate what this step needs; called before the forward pass, and the only allocator.

        Requests in `batch.context_requests` that hold no blocks yet are admitted: blocks for the
        whole prompt, ``num_computed_tokens`` set to what is reused. Generating requests get the
        slot of their next token. See `ScheduledBatch` for what is moved where.
        """

    @abstractmethod
    def update_resources(self, batch: ScheduledBatch) -> None:
        """The step is over and ``num_computed_tokens`` is up to date: publish what was filled."""

    @abstractmethod
    def free_resources(self, request: LlmRequest) -> None:
        """`request` ended or is preempted: publish its ``num_computed_tokens``, then let go."""

    @abstractmethod
    def get_max_resource_count(self) -> int:
        """Blocks in all."""

    @abstractmethod
    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        """Blocks that `request` still needs to run to its ``max_tokens``, exactly.

        Counted without reuse: what it will hold at its end minus what it holds now. With several
        pools: blocks of group 0.
        """

    def needed_blocks(self, request: LlmRequest) -> tuple[int, ...]:
        """Blocks of each pool group that `request` needs beyond those it holds, at its peak."""
        return (self.get_needed_resource_to_completion(request),)


class BaseKVCacheManager(BaseResourceManager):
    """A resource manager for KV blocks: what the engine needs besides allocation.

    The methods from `set_external_matcher` on serve connectors; a manager without them says so with
    ``supports_connector = False`` and the engine then refuses to attach one. One without pools for
    sliding windows (``supports_window_pools = False``) gets one layout for all layers, and windows
    are masks only.

    What `needed_blocks` raises for a request that waits, and `prepare_resources` for a batch of one
    that is to be admitted, ends that request and no other. (If a batch of several raises, those
    whose state is not ``QUEUED`` any more are freed, and each comes again alone.) A manager of
    which other requests' blocks may not be what they should after such an error says so with
    ``raises_for_requests = False``. Then, as with what it raises anywhere else, the engine ends:
    who holds which blocks, and what is in them, is not known, and a wrong token is worse.
    """

    raises_for_requests: ClassVar[bool] = True
    supports_connector: ClassVar[bool] = False
    supports_window_pools: ClassVar[bool] = False

    @abstractmethod
    def get_batch_cache_indices(self, requests: Sequence[LlmRequest]) -> Mapping[int, list[int]]:
        """Block ids of each request, by request id, in order of its tokens; of group 0."""

    def get_group_cache_indices(
        self, requests: Sequence[LlmRequest], group: int
    ) -> Mapping[int, list[int]]:
        """As `get_batch_cache_indices` for one pool group; -1 where the request holds no block."""
        if group != 0:
            raise ConfigurationError(f"group: {group} does not exist; there is only group 0")
        return self.get_batch_cache_indices(requests)

    @abstractmethod
    def get_buffers(self, layer_idx: int) -> Tensor | tuple[Tensor, Tensor]:
        """The layer's KV memory, as a view ``[num_blocks, 2, T, num_kv_heads, head_dim]``.

        Where key and value dimensions differ, two views ``[num_blocks, T, num_kv_heads, dim]``.
        """

    @abstractmethod
    def get_num_free_blocks(self) -> int:
        """Blocks that could be allocated now; with several pools, of group 0."""

    def ensure_free(self, needs: Sequence[int]) -> bool:
        """Whether each pool group can supply so many blocks now; False changes nothing.

        It may move memory from one pool to another to make it so.
        """
        return needs[0] <= self.get_num_free_blocks()

    def reusable_tokens(self, request: LlmRequest, published: int = 0) -> int:
        """Leading tokens that `request`, which holds no blocks, would reuse if it were admitted.

        Changes nothing. A manager that reuses nothing says 0, as this does: then no request waits
        for another that computes the same tokens.

        Args:
            request: waits.
            published: as if its first so many tokens, whole blocks, were in the cache.
        """
        return 0

    def expect_chunks(self, max_chunk_tokens: int) -> None:
        """No request will compute more prompt tokens than this in one step; told at the start.

        Pools of sliding windows then hold blocks for so many at a time: see `needed_blocks`.
        """

    def add_padding_request(self, request_id: int) -> None:
        """Holds a block for a request of one token, to warm up with; nothing of it is published.

        The engine does not ask for it; a manager may go without.

        Raises:
            ConfigurationError: the manager goes without.
        """
        raise ConfigurationError(
            f"{type(self).__name__} has no padding requests; override add_padding_request"
        )

    def reset(self) -> bool:
        """Drops every cached block; False, as by default: nothing was dropped."""
        return False

    def take_events(self) -> list[KvCacheEvent]:
        """What changed in the cache since the last call, oldest first; on any thread."""
        return []

    def set_external_matcher(self, matcher: ExternalMatcher) -> None:
        """Ask `matcher` during admission from now on."""
        raise self._no_connector()

    def pool_tensor(self, group: int = 0) -> Tensor:
        """The whole pool of a group, as the flat view that connectors register."""
        raise self._no_connector()

    def detach(self, request: LlmRequest, first_block: int) -> PinnedBlocks:
        """Take the blocks from `first_block` on away from `request`, which gets fresh ones.

        Raises:
            OutOfBlocks: there are not enough; nothing changed.
        """
        raise self._no_connector()

    def pin(self, request: LlmRequest) -> PinnedBlocks:
        """Keep the blocks that `request` holds now, also after it let go of them."""
        raise self._no_connector()

    def unpin(self, handle: PinnedBlocks) -> None:
        """Let go of what `handle` holds."""
        raise self._no_connector()

    def publish_ended(self, request: LlmRequest) -> None:
        """`request` ended, but holds its blocks until they are saved; `free_resources` follows.

        What is valid of it may be published now already. Default: nothing.
        """

    def get_priorities(self, request: LlmRequest, start: int = 0) -> list[int]:
        """Retention priority of each block of `request` from block `start` on."""
        raise self._no_connector()

    def rewind(self, request: LlmRequest, num_tokens: int) -> None:
        """`request` loses its last `num_tokens` tokens (rejected drafts)."""
        raise self._no_connector()

    def _no_connector(self) -> ConfigurationError:
        return ConfigurationError(
            f"{type(self).__name__} does not support connectors (supports_connector is False)"
        )


KVCacheManagerFactory: TypeAlias = Callable[
    [KvCacheConfig, Sequence[KvCacheLayout], torch.device], BaseKVCacheManager
]
"""Makes a cache manager; `KVCacheManager` itself is one."""
