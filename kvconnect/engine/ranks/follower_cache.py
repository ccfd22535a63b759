"""A follower's share of the KV cache: memory in the leader's blocks, without their manager."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from kvconnect.cache.memory.cache_memory import CacheMemory
from kvconnect.cache.memory.copier import TensorCopier
from kvconnect.cache.memory.sizing import PoolSizes
from kvconnect.cache.resource_manager import BaseKVCacheManager, PinnedBlocks
from kvconnect.engine.ranks.copies import make_copies
from kvconnect.engine.ranks.messages import BlockCopy
from kvconnect.errors import UsageError
from kvconnect.layout import KvCacheLayout
from kvconnect.request import ExternalMatcher, LlmRequest, ScheduledBatch

__all__ = ["FollowerCache"]


class FollowerCache(BaseKVCacheManager):
    """The pools of a follower. Which blocks are whose, and held how long, the leader decides.

    Args:
        sizes: the leader's.
        layouts: of this rank's pools.
        device: where they lie.

    Raises:
        UsageError: `layouts` are not the leader's.
        ConfigurationError: so much host memory cannot be had.
    """

    supports_connector: ClassVar[bool] = True
    supports_window_pools: ClassVar[bool] = True

    def __init__(
        self, sizes: PoolSizes, layouts: Sequence[KvCacheLayout], device: torch.device
    ) -> None:
        if sizes.layouts != tuple(layouts):
            raise UsageError(f"the leader's pools are {sizes.layouts}, this rank's {layouts}")
        self._sizes = sizes
        self._memory = CacheMemory(sizes, device)
        self._copier = TensorCopier(self._memory.pools, self._memory.host_pools, sizes.layouts)

    def make_copies(self, copies: Sequence[BlockCopy]) -> None:
        """Make the copies that the leader's block manager ordered."""
        with self._copier.together():
            make_copies(self._copier, copies)

    def get_buffers(self, layer_idx: int) -> Tensor | tuple[Tensor, Tensor]:
        """See `BaseKVCacheManager`."""
        return self._memory.buffers(layer_idx)

    def pool_tensor(self, group: int = 0) -> Tensor:
        """See `BaseKVCacheManager`."""
        return self._memory.pools[group]

    def get_max_resource_count(self) -> int:
        """Blocks of group 0."""
        return self._sizes.num_blocks[0]

    # ------------------------------------------------------------------ the leader decides

    def get_batch_cache_indices(self, requests: Sequence[LlmRequest]) -> Mapping[int, list[int]]:
        """None: the leader knows."""
        return {request.request_id: [] for request in requests}

    def get_num_free_blocks(self) -> int:
        """None: the leader gives them out."""
        return 0

    def set_external_matcher(self, matcher: ExternalMatcher) -> None:
        """Nothing: the leader asks."""

    def detach(self, request: LlmRequest, first_block: int) -> PinnedBlocks:
        """An empty handle: the leader holds the blocks."""
        return PinnedBlocks()

    def pin(self, request: LlmRequest) -> PinnedBlocks:
        """An empty handle: the leader holds the blocks."""
        return PinnedBlocks()

    def unpin(self, handle: PinnedBlocks) -> None:
        """Nothing."""

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        """Not asked."""
        raise _decides()

    def prepare_resources(self, batch: ScheduledBatch) -> None:
        """Not asked."""
        raise _decides()

    def update_resources(self, batch: ScheduledBatch) -> None:
        """Not asked."""
        raise _decides()

    def free_resources(self, request: LlmRequest) -> None:
        """Not asked."""
        raise _decides()


def _decides() -> UsageError:
    return UsageError("FollowerCache: the leader's cache manager decides")
