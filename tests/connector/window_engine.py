"""Several pools without reuse, and an engine whose layers see no further back than their window.

The "KV" of a position is a checksum over its token and the KV that its layer may see, as read from
the pools; the next token is one over what all layers see. Blocks are overwritten the moment they
are given back. So a block that is missing, wrong or read too late changes the answer.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from bench_engine import DIGEST, BenchEngine, T
from torch import Tensor

from kvconnect.backend import Backend
from kvconnect.cache.memory.pool_tensor import layer_buffers
from kvconnect.cache.resource_manager import BaseKVCacheManager, PinnedBlocks
from kvconnect.config import KvCacheConfig, KvCacheConnectorConfig
from kvconnect.connector.data import LlmArgs
from kvconnect.connector.io.lookup import blocks_needed
from kvconnect.errors import OutOfBlocks
from kvconnect.keys import Namespace, Shard, root_key
from kvconnect.layout import KvCacheLayout
from kvconnect.request import (
    ExternalMatcher,
    LlmRequest,
    RequestState,
    SamplingParams,
    ScheduledBatch,
)

Layouts = tuple[KvCacheLayout, ...]
GARBAGE = 6.66e66


def layout(window: int | None, *layers: int, head_dim: int = 1) -> KvCacheLayout:
    return KvCacheLayout(len(layers), 1, head_dim, head_dim, T, torch.float64, window, layers)


# Frames of 4 and 20 KiB; the layers of the groups alternate as in Gemma3.
FULL_AND_WINDOW = (layout(None, 2, 5), layout(10, 0, 1, 3, 4, head_dim=64))
TWO_WINDOWS = (layout(None, 1, head_dim=64), layout(13, 0, 3), layout(6, 2))
WINDOW_ONLY = (layout(10, 0, 1),)
TWO_SHAPES = (layout(None, 0, 2), layout(None, 1, head_dim=3))
ALL_LAYOUTS = (FULL_AND_WINDOW, TWO_WINDOWS, WINDOW_ONLY, TWO_SHAPES)


class Pin(PinnedBlocks):
    """Block ids of each group that stay."""

    __slots__ = ("ids",)

    def __init__(self, ids: list[list[int]]) -> None:
        self.ids = ids


class WindowKv(BaseKVCacheManager):
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
        self.blocks: dict[int, list[list[int]]] = {}
        self.matcher: ExternalMatcher | None = None
        self.device_match: Callable[[LlmRequest], int] = lambda _: 0
        self.fill: Callable[[LlmRequest], None] = lambda _: None
        self.max_matched: Callable[[int], int] = lambda position: position

    def prepare_resources(self, batch: ScheduledBatch) -> None:
        for request in list(batch.context_requests):
            if request.request_id not in self.blocks:
                self._admit(request, batch)
            else:
                self._reserve(request, request.num_computed_tokens)
        for request in batch.generation_requests:
            need = -(-(request.num_tokens + len(request.draft_tokens)) // T)
            for group, ids in enumerate(self.blocks[request.request_id]):
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
        request.num_external_tokens = match.end if taken else 0
        start = max(request.num_computed_tokens, request.num_external_tokens)
        self.blocks[request.request_id] = []
        for group, one in enumerate(self.layouts):
            first = blocks_needed(one.window, start, T).start
            held = self._take(group, need - first) if one.window is None else []
            self.blocks[request.request_id].append([-1] * first + held)
        self._reserve(request, start)
        self.fill(request)
        if self.matcher is not None:
            ids = [self.trimmed(request, group) for group in range(len(self.layouts))]
            self.matcher.blocks_allocated(request, ids[0], ids)
        if taken and match.is_async:
            request.state = RequestState.LOADING
            batch.context_requests.remove(request)
            batch.loading_requests.append(request)
        else:
            request.state = RequestState.CONTEXT

    def _reserve(self, request: LlmRequest, start: int) -> None:
        end = min(request.num_tokens, start + self.chunk)
        for group, ids in enumerate(self.blocks[request.request_id]):
            ids.extend(self._take(group, -(-end // T) - len(ids)))

    def update_resources(self, batch: ScheduledBatch) -> None:
        for request in batch.requests:
            for group, one in enumerate(self.layouts):
                ids = self.blocks[request.request_id][group]
                first = blocks_needed(one.window, request.num_computed_tokens, T).start
                self._drop(group, [block for block in ids[:first] if block >= 0])
                ids[:first] = [-1] * first

    def free_resources(self, request: LlmRequest) -> None:
        for group, ids in enumerate(self.blocks.pop(request.request_id)):
            self._drop(group, [block for block in ids if block >= 0])

    def _take(self, group: int, number: int) -> list[int]:
        references = self.references[group]
        free = [block for block in range(len(self.pools[group])) if not references[block]]
        if len(free) < number:
            raise OutOfBlocks(f"{number} blocks, {len(free)} are free")
        taken = free[: max(0, number)]
        references.update(taken)
        return taken

    def _drop(self, group: int, ids: Sequence[int]) -> None:
        self.references[group].subtract(ids)
        for block in ids:
            assert self.references[group][block] >= 0
            if not self.references[group][block]:
                self.pools[group][block] = GARBAGE

    def num_free(self, group: int) -> int:
        return len(self.pools[group]) - sum(map(bool, self.references[group].values()))

    def all_free(self) -> bool:
        return not any(any(references.values()) for references in self.references)

    def trimmed(self, request: LlmRequest, group: int) -> list[int]:
        return list(self.blocks[request.request_id][group])

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
        ids = [[block for block in ids if block >= 0] for ids in self.blocks[request.request_id]]
        for references, held in zip(self.references, ids, strict=True):
            references.update(held)
        return Pin(ids)

    def unpin(self, handle: PinnedBlocks) -> None:
        assert isinstance(handle, Pin)
        for group, ids in enumerate(handle.ids):
            self._drop(group, ids)

    def get_priorities(self, request: LlmRequest, start: int = 0) -> list[int]:
        return [35] * (-(-request.num_tokens // T) - start)


class WindowEngine(BenchEngine):
    """A `BenchEngine` over a `WindowKv`."""

    kv: WindowKv

    def __init__(self, args: LlmArgs, *, kv: WindowKv | None = None, chunk: int = 1000, **rest):
        kv = kv or WindowKv(args.layouts)
        kv.chunk = chunk
        super().__init__(args, kv=kv, chunk=chunk, **rest)

    def submit(
        self, prompt: Sequence[int], max_tokens: int = 1, salt: str | None = None
    ) -> LlmRequest:
        request = new_request(next(self._ids), prompt, self.kv.layouts, max_tokens, salt)
        self.queue.append(request)
        self.requests[request.request_id] = request
        self.manager.on_new_request(request)
        return request

    def forward(self, batch: ScheduledBatch) -> dict[int, int]:
        if not batch.requests:
            return {}
        for layer in range(sum(one.num_layers for one in self.kv.layouts)):
            self.manager.wait_for_layer_load(layer)
            for request in batch.requests:
                self.write(request, layer)
            self.manager.save_kv_layer(layer)
        self.manager.end_forward()
        return {
            one.request_id: self.token(one)
            for one in batch.requests
            if self._first(one) + one.num_scheduled_tokens >= one.num_tokens
        }

    def write(self, request: LlmRequest, layer: int) -> None:
        first = self._first(request)
        planes, ids, window = self._layer(request, layer)
        for position in range(first, min(first + request.num_scheduled_tokens, request.num_tokens)):
            seen = _visible(planes, ids, window, position)
            text = f"{int(request.tokens.view[position])} {layer}".encode()
            planes[ids[position // T], :, position % T] = float(zlib.crc32(seen + text))

    def token(self, request: LlmRequest) -> int:
        state = 0
        for layer in range(sum(one.num_layers for one in self.kv.layouts)):
            state = zlib.crc32(_visible(*self._layer(request, layer), request.num_tokens), state)
        return state % 97

    def _layer(self, request: LlmRequest, layer: int) -> tuple[np.ndarray, list[int], int | None]:
        group = next(g for g, one in enumerate(self.kv.layouts) if layer in one.layer_numbers)
        buffers = self.kv.get_buffers(layer)
        assert isinstance(buffers, Tensor)
        ids = self.kv.blocks[request.request_id][group]
        return buffers.numpy(), ids, self.kv.layouts[group].window


def _visible(planes: np.ndarray, ids: list[int], window: int | None, position: int) -> bytes:
    """What a layer sees of the KV before `position`."""
    first = 0 if window is None else max(0, position - window + 1)
    numbers = np.arange(first, position)
    blocks = np.array(ids, np.int64)[numbers // T] if first < position else numbers
    assert (blocks >= 0).all(), "the window needs a block that was given up"
    return planes[blocks, :, numbers % T].tobytes()


def new_request(
    request_id: int,
    prompt: Sequence[int],
    layouts: Sequence[KvCacheLayout],
    max_tokens: int = 1,
    salt: str | None = None,
) -> LlmRequest:
    namespace = Namespace(cache_salt=salt)
    return LlmRequest(
        request_id,
        np.array(prompt, np.int32),
        chain_root=root_key(DIGEST, layouts, namespace),
        tokens_per_block=T,
        namespace=namespace,
        sampling_params=SamplingParams(max_tokens=max_tokens),
    )


def llm_args(
    store: str | Backend | KvCacheConnectorConfig,
    layouts: Sequence[KvCacheLayout],
    *,
    shard: Shard = Shard(),
    **settings,
) -> LlmArgs:
    """What a connector for `layouts` is built with."""
    if isinstance(store, KvCacheConnectorConfig):
        config = store
    else:
        where = {"url": store} if isinstance(store, str) else {"backend": store}
        config = KvCacheConnectorConfig(**where, **{"lookup_timeout_ms": 60_000, **settings})
    cache = KvCacheConfig(tokens_per_block=T)
    return LlmArgs("model", cache, config, tuple(layouts), DIGEST, shard)


def plain_run(
    prompt: Sequence[int], layouts: Sequence[KvCacheLayout], max_tokens: int = 1
) -> tuple[LlmRequest, WindowKv]:
    """`prompt` answered without any connector, and where its KV is."""
    engine = object.__new__(WindowEngine)
    engine.kv = kv = WindowKv(layouts, 256)
    request = new_request(0, prompt, layouts)
    for _ in range(max_tokens):
        first = request.num_generated_tokens == 0
        batch = ScheduledBatch([request], []) if first else ScheduledBatch([], [request])
        kv.prepare_resources(batch)
        request.num_scheduled_tokens = request.num_tokens - request.num_computed_tokens
        for layer in range(sum(one.num_layers for one in layouts)):
            engine.write(request, layer)
        token = engine.token(request)
        request.num_computed_tokens = request.num_tokens
        request.append_tokens(np.array([token], np.int32))
    return request, kv


def reference(
    prompt: Sequence[int], layouts: Sequence[KvCacheLayout], max_tokens: int = 1
) -> list[int]:
    """The answer without any connector."""
    request, _ = plain_run(prompt, layouts, max_tokens)
    return request.tokens.view[len(prompt) :].tolist()
