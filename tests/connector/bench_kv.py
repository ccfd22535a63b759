"""A cache manager without reuse: pools whose blocks are overwritten the moment they are given back.

So a block that is missing, wrong or read too late changes the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kvconnect.cache.memory.pool_tensor import layer_buffers
from kvconnect.cache.resource_manager import BaseKVCacheManager, PinnedBlocks
from kvconnect.connector.io.lookup import blocks_needed
from kvconnect.errors import OutOfBlocks
from kvconnect.layout import KvCacheLayout
from kvconnect.request import ExternalMatcher, LlmRequest, RequestState, ScheduledBatch

T = 4
LAYERS = 3
LAYOUT = KvCacheLayout(LAYERS, 1, 1, 1, T, torch.float64)
GARBAGE = 6.66e66

Layouts = tuple[KvCacheLayout, ...]


class Pin(PinnedBlocks):
    """Block ids of each group that stay."""

    __slots__ = ("ids",)

    def __init__(self, ids: list[list[int]]) -> None:
        self.ids = ids


class GroupKv(BaseKVCacheManager):
    """Blocks by reference count, in a pool per group; device matches only where a test plants one.

    `chunk` is what a request computes at most in one step: windows hold blocks for that far.
    """

    supports_connector = True
    supports_window_pools = True

    def __init__(
        self, layouts: Sequence[KvCacheLayout], num_blocks: int = 64, chunk: int = 1000
    ) -> None:
        self.layouts = tuple(layouts)
        self.chunk = chunk
        self.pools = [
            torch.full(one.flat_shape(num_blocks), GARBAGE, dtype=one.dtype) for one in layouts
        ]
        self.references = [Counter[int]() for _ in layouts]
        self.held: dict[int, list[list[int]]] = {}  # -1 where a window holds none
        self.matcher: ExternalMatcher | None = None
        self.device_match: Callable[[LlmRequest], int] = lambda _: 0
        self.fill: Callable[[LlmRequest], None] = lambda _: None
        self.max_matched: Callable[[int], int] = lambda position: position
        self.priority = 35
        self.published: dict[int, int] = {}  # request -> tokens that were called valid at its end

    def prepare_resources(self, batch: ScheduledBatch) -> None:
        for request in list(batch.context_requests):
            if request.request_id not in self.held:
                self._admit(request, batch)
            else:
                self._reserve(request, request.num_computed_tokens)
        for request in batch.generation_requests:
            need = -(-(request.num_tokens + len(request.draft_tokens)) // T)
            for group, ids in enumerate(self.held[request.request_id]):
                ids.extend(self._take(group, need - len(ids)))

    def _admit(self, request: LlmRequest, batch: ScheduledBatch) -> None:
        need = -(-request.num_tokens // T)
        if any(need > self.num_free(group) for group in range(len(self.layouts))):
            batch.context_requests.remove(request)
            batch.refused_requests.append(request)
            return
        matched = self.device_match(request)
        match = self.matcher.match_external(request, matched) if self.matcher else None
        taken = match is not None and match.num_tokens > 0
        request.num_computed_tokens = self.max_matched(match.position) if taken else matched
        overlaps = taken and match.overlaps
        request.num_external_tokens = match.end if taken and not overlaps else 0
        request.load_end = request.loaded_from = match.end if overlaps else 0
        start = max(request.num_computed_tokens, request.num_external_tokens)
        self.held[request.request_id] = []
        for group, one in enumerate(self.layouts):
            first = blocks_needed(one.window, start, T).start
            held = self._take(group, need - first) if one.window is None else []
            self.held[request.request_id].append([-1] * first + held)
        self._reserve(request, start)
        self.fill(request)
        if self.matcher is not None:
            ids = [self.trimmed(request, group) for group in range(len(self.layouts))]
            self.matcher.blocks_allocated(request, ids[0])
        if taken and match.is_async:
            request.state = RequestState.LOADING
            batch.context_requests.remove(request)
            batch.loading_requests.append(request)
        else:
            request.state = RequestState.CONTEXT

    def _reserve(self, request: LlmRequest, start: int) -> None:
        end = min(request.num_tokens, start + self.chunk)
        for group, ids in enumerate(self.held[request.request_id]):
            ids.extend(self._take(group, -(-end // T) - len(ids)))

    def update_resources(self, batch: ScheduledBatch) -> None:
        for request in batch.requests:
            for group, one in enumerate(self.layouts):
                ids = self.held[request.request_id][group]
                first = blocks_needed(one.window, request.num_computed_tokens, T).start
                self._drop(group, ids[:first])
                ids[:first] = [-1] * first

    def free_resources(self, request: LlmRequest) -> None:
        self.published[request.request_id] = request.num_computed_tokens
        for group, ids in enumerate(self.held.pop(request.request_id)):
            self._drop(group, ids)

    def free_ids(self, group: int = 0) -> list[int]:
        references = self.references[group]
        return [block for block in range(len(self.pools[group])) if not references[block]]

    def _take(self, group: int, number: int) -> list[int]:
        free = self.free_ids(group) if number > 0 else []
        if len(free) < number:
            raise OutOfBlocks(f"{number} blocks, {len(free)} are free")
        taken = free[: max(0, number)]
        self.references[group].update(taken)
        return taken

    def _drop(self, group: int, ids: Sequence[int]) -> None:
        held = [block for block in ids if block >= 0]
        self.references[group].subtract(held)
        for block in held:
            assert self.references[group][block] >= 0
            if not self.references[group][block]:
                self.pools[group][block] = GARBAGE

    def num_free(self, group: int) -> int:
        return len(self.pools[group]) - sum(map(bool, self.references[group].values()))

    def all_free(self) -> bool:
        return not any(any(references.values()) for references in self.references)

    def trimmed(self, request: LlmRequest, group: int) -> list[int]:
        return list(self.held[request.request_id][group])

    def get_max_resource_count(self) -> int:
        return len(self.pools[0])

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        return -(-(request.prompt_len + request.sampling_params.max_tokens - 1) // T)

    def get_batch_cache_indices(self, requests: Sequence[LlmRequest]) -> Mapping[int, list[int]]:
        return self.get_group_cache_indices(requests, 0)

    def get_group_cache_indices(
        self, requests: Sequence[LlmRequest], group: int
    ) -> Mapping[int, list[int]]:
        indices = {}
        for request in requests:
            ids = self.trimmed(request, group)
            length = -(-request.num_tokens // T)
            indices[request.request_id] = ids + [-1] * (length - len(ids))
        return indices

    def get_buffers(self, layer_idx: int) -> Tensor | tuple[Tensor, Tensor]:
        group, one = next(
            (group, one) for group, one in enumerate(self.layouts) if layer_idx in one.layer_numbers
        )
        return layer_buffers(self.pools[group], one, one.layer_numbers.index(layer_idx))

    def get_num_free_blocks(self) -> int:
        return self.num_free(0)

    def set_external_matcher(self, matcher: ExternalMatcher) -> None:
        self.matcher = matcher

    def pool_tensor(self, group: int = 0) -> Tensor:
        return self.pools[group]

    def pin(self, request: LlmRequest) -> Pin:
        ids = [[block for block in ids if block >= 0] for ids in self.held[request.request_id]]
        for references, held in zip(self.references, ids, strict=True):
            references.update(held)
        return Pin(ids)

    def detach(self, request: LlmRequest, first_block: int) -> Pin:
        [held] = self.held[request.request_id]
        fresh = self._take(0, len(held) - first_block)
        pin = Pin([held[first_block:]])
        held[first_block:] = fresh
        return pin

    def unpin(self, handle: PinnedBlocks) -> None:
        assert isinstance(handle, Pin)
        for group, ids in enumerate(handle.ids):
            self._drop(group, ids)

    def get_priorities(self, request: LlmRequest, start: int = 0) -> list[int]:
        return [self.priority] * (-(-request.num_tokens // T) - start)

    def rewind(self, request: LlmRequest, num_tokens: int) -> None:
        kept = -(-(request.num_tokens - num_tokens) // T)
        for group, ids in enumerate(self.held[request.request_id]):
            self._drop(group, ids[kept:])
            del ids[kept:]


class PlainKv(GroupKv):
    """One pool without windows."""

    def __init__(self, num_blocks: int = 64, layout: KvCacheLayout = LAYOUT) -> None:
        super().__init__((layout,), num_blocks)
        [self.pool] = self.pools

    @property
    def blocks(self) -> dict[int, list[int]]:
        """The ids of each request's blocks."""
        return {request_id: ids for request_id, [ids] in self.held.items()}
