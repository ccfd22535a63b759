"""A cache manager without reuse and an engine without a model: enough to drive connectors.

The "KV" of a position is a checksum over the token, the layer and the KV of the position before, as
read from the pool; the next token is a checksum over all KV of the sequence. So any wrong byte in a
block that is used changes the answer.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Self

import numpy as np
import torch
from bench_rank import Share, Work
from torch import Tensor

from kvconnect.backend import Backend
from kvconnect.cache.resource_manager import BaseKVCacheManager, PinnedBlocks
from kvconnect.config import KvCacheConfig, KvCacheConnectorConfig
from kvconnect.connector.data import LlmArgs
from kvconnect.connector.ranks.communicator import Communicator
from kvconnect.connector.runtime.ledger import StepOutcome
from kvconnect.connector.runtime.manager import KvCacheConnectorManager
from kvconnect.errors import ConnectorContractError, OutOfBlocks
from kvconnect.keys import Namespace, Shard, root_key
from kvconnect.layout import KvCacheLayout
from kvconnect.request import (
    ExternalMatcher,
    LlmRequest,
    RequestState,
    SamplingParams,
    ScheduledBatch,
)

T = 4
LAYERS = 3
LAYOUT = KvCacheLayout(LAYERS, 1, 1, 1, T, torch.float64)
DIGEST = b"d" * 32


class Pin(PinnedBlocks):
    """Block ids that stay."""

    __slots__ = ("ids",)

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids


class PlainKv(BaseKVCacheManager):
    """Blocks by reference count; a device match only where a test plants one."""

    supports_connector = True

    def __init__(self, num_blocks: int = 64, layout: KvCacheLayout = LAYOUT) -> None:
        self.pool = torch.zeros(layout.flat_shape(num_blocks), dtype=torch.float64)
        self.references = Counter[int]()
        self.blocks: dict[int, list[int]] = {}
        self.matcher: ExternalMatcher | None = None
        self.device_match: Callable[[LlmRequest], int] = lambda _: 0
        self.priority = 35
        self.published: dict[int, int] = {}  # request -> tokens that were called valid at its end

    def free_ids(self) -> list[int]:
        return [i for i in range(len(self.pool)) if self.references[i] == 0]

    def _take(self, number: int) -> list[int]:
        free = self.free_ids()
        if len(free) < number:
            raise OutOfBlocks(f"{number} blocks, {len(free)} are free")
        self.references.update(free[:number])
        return free[:number]

    def _drop(self, ids: Sequence[int]) -> None:
        self.references.subtract(ids)
        assert min(self.references.values(), default=0) >= 0

    def prepare_resources(self, batch: ScheduledBatch) -> None:
        for request in list(batch.context_requests):
            if request.request_id not in self.blocks:
                self._admit(request, batch)
        for request in batch.generation_requests:
            held = self.blocks[request.request_id]
            need = -(-(request.num_tokens + len(request.draft_tokens)) // T)
            held += self._take(need - len(held))

    def _admit(self, request: LlmRequest, batch: ScheduledBatch) -> None:
        need = -(-request.num_tokens // T)
        if need > len(self.free_ids()):
            batch.context_requests.remove(request)
            batch.refused_requests.append(request)
            return
        matched = self.device_match(request)
        match = self.matcher.match_external(request, matched) if self.matcher else None
        taken = match is not None and match.num_tokens > 0
        request.num_computed_tokens = match.position if taken else matched
        request.num_external_tokens = match.end if taken else 0
        self.blocks[request.request_id] = self._take(need)
        if self.matcher is not None:
            self.matcher.blocks_allocated(request, list(self.blocks[request.request_id]))
        if taken and match.is_async:
            request.state = RequestState.LOADING
            batch.context_requests.remove(request)
            batch.loading_requests.append(request)
        else:
            request.state = RequestState.CONTEXT

    def update_resources(self, batch: ScheduledBatch) -> None: ...

    def free_resources(self, request: LlmRequest) -> None:
        self.published[request.request_id] = request.num_computed_tokens
        self._drop(self.blocks.pop(request.request_id))

    def get_max_resource_count(self) -> int:
        return len(self.pool)

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        return -(-(request.prompt_len + request.sampling_params.max_tokens - 1) // T)

    def get_batch_cache_indices(self, requests: Sequence[LlmRequest]) -> Mapping[int, list[int]]:
        return {one.request_id: list(self.blocks[one.request_id]) for one in requests}

    def get_buffers(self, layer_idx: int) -> Tensor:
        return self.pool[:, layer_idx].view(-1, 2, T, 1, 1)

    def get_num_free_blocks(self) -> int:
        return len(self.free_ids())

    def set_external_matcher(self, matcher: ExternalMatcher) -> None:
        self.matcher = matcher

    def pool_tensor(self, group: int = 0) -> Tensor:
        return self.pool

    def detach(self, request: LlmRequest, first_block: int) -> Pin:
        held = self.blocks[request.request_id]
        fresh = self._take(len(held) - first_block)
        pin = Pin(held[first_block:])
        held[first_block:] = fresh
        return pin

    def pin(self, request: LlmRequest) -> Pin:
        ids = list(self.blocks[request.request_id])
        self.references.update(ids)
        return Pin(ids)

    def unpin(self, handle: PinnedBlocks) -> None:
        assert isinstance(handle, Pin)
        self._drop(handle.ids)

    def get_priorities(self, request: LlmRequest, start: int = 0) -> list[int]:
        return [self.priority] * (len(self.blocks[request.request_id]) - start)

    def rewind(self, request: LlmRequest, num_tokens: int) -> None:
        kept = -(-(request.num_tokens - num_tokens) // T)
        self._drop(self.blocks[request.request_id][kept:])
        del self.blocks[request.request_id][kept:]


def llm_args(
    store: str | Backend | KvCacheConnectorConfig,
    *,
    enable_block_reuse: bool = True,
    shard: Shard = Shard(),
    **settings,
) -> LlmArgs:
    """What a connector for `LAYOUT` is built with."""
    if isinstance(store, str):
        config = KvCacheConnectorConfig(url=store, **settings)
    elif isinstance(store, Backend):
        config = KvCacheConnectorConfig(backend=store, **settings)
    else:
        config = store
    cache = KvCacheConfig(tokens_per_block=T, enable_block_reuse=enable_block_reuse)
    return LlmArgs("model", cache, config, (LAYOUT,), DIGEST, shard)


class BenchEngine:
    """Steps a connector manager as an engine does. Single-threaded: a test calls `step`."""

    _ids = count()

    def __init__(
        self,
        args: LlmArgs,
        *,
        kv: PlainKv | None = None,
        chunk: int = 1000,
        communicator: Communicator | None = None,
    ) -> None:
        self.kv = kv or PlainKv()
        self.woken = threading.Event()
        self.manager = KvCacheConnectorManager(
            args, self.kv, wakeup=self.woken.set, communicator=communicator
        )
        self.has_other_ranks = communicator is not None and communicator.size > 1
        self.overwritten: list[int] = []  # blocks that other ranks are to fill with other content
        self.chunk = chunk
        self.queue: list[LlmRequest] = []
        self.running: list[LlmRequest] = []
        self.loading: dict[int, LlmRequest] = {}
        self.saving: dict[int, LlmRequest] = {}
        self.outcomes: list[StepOutcome] = []
        self.requests: dict[int, LlmRequest] = {}
        self.store_tokens: Counter[int] = Counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self.manager.expects_news():
            with suppress(ConnectorContractError):  # already seen by the test
                self.manager.end_step()
        self.manager.shutdown()

    # ------------------------------------------------------------------ requests

    def submit(
        self, prompt: Sequence[int], max_tokens: int = 1, salt: str | None = None
    ) -> LlmRequest:
        namespace = Namespace(cache_salt=salt)
        request = LlmRequest(
            next(self._ids),
            np.array(prompt, np.int32),
            chain_root=root_key(DIGEST, (LAYOUT,), namespace),
            tokens_per_block=T,
            namespace=namespace,
            sampling_params=SamplingParams(max_tokens=max_tokens),
        )
        self.queue.append(request)
        self.requests[request.request_id] = request
        self.manager.on_new_request(request)
        return request

    def abort(self, request: LlmRequest) -> None:
        self._finish(request, aborted=True)

    def answer(
        self, prompt: Sequence[int], max_tokens: int = 1, salt: str | None = None
    ) -> list[int]:
        """Submit, run to the end, return the generated tokens."""
        request = self.submit(prompt, max_tokens, salt)
        self.run()
        return request.tokens.view[len(prompt) :].tolist()

    def answer_beside(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """As `answer`, while others may be stuck."""
        request = self.submit(prompt, max_tokens)
        deadline = time.monotonic() + 60
        while request.state is not RequestState.FINISHED:
            assert time.monotonic() < deadline
            self.step()
        return request.tokens.view[len(prompt) :].tolist()

    def run(self, limit_s: float = 60.0) -> None:
        """Until nothing is left to do."""
        deadline = time.monotonic() + limit_s
        while self.queue or self.running or self.loading or self.saving:
            assert time.monotonic() < deadline, "the engine hangs"
            if not self.step():
                self.sleep()

    def sleep(self) -> None:
        """As an engine does with nothing runnable."""
        seconds = self.manager.wait_seconds()
        assert seconds is not None, "nothing is pending, and yet there is work"
        woken = self.woken.wait(min(seconds, 20.0))
        assert woken or seconds < 20.0, "something was to end, and nobody woke the engine"
        self.woken.clear()

    # ------------------------------------------------------------------ one step

    def step(self) -> bool:
        batch = self.schedule()
        self._raise_first()
        scheduled = bool(batch.requests or batch.loading_requests)
        if scheduled:
            self.manager.begin_step(batch, self.work(batch))
        logits = self.forward(batch)
        self._advance(batch, self.manager.agree() if scheduled else {}, logits)
        outcome = self.manager.end_step()
        self.outcomes.append(outcome)
        self._settle(outcome)
        self._raise_first()
        return bool(batch.requests or outcome.loaded or outcome.failed or outcome.saved)

    def work(self, batch: ScheduledBatch) -> Work | None:
        """What the other ranks do in a step; ``None``: there are none."""
        if not self.has_other_ranks:
            return None
        overwritten, self.overwritten = self.overwritten, []
        return Work([self.share(one) for one in batch.requests], overwritten)

    def share(self, request: LlmRequest) -> Share:
        first = self._first(request)
        return Share(
            request.request_id,
            first,
            first + request.num_scheduled_tokens,
            request.tokens.view.tolist(),
            list(self.kv.blocks[request.request_id]),
        )

    def idle_step(self) -> StepOutcome:
        """A step without a batch, whatever waits."""
        self.manager.begin_idle_step(self.work(ScheduledBatch()))
        return self.manager.end_step()

    def _raise_first(self) -> None:
        """What a real engine ends a request by."""
        for error in self.manager.take_errors().values():
            raise error

    def schedule(self) -> ScheduledBatch:
        contexts = [one for one in self.running if one.state is RequestState.CONTEXT]
        batch = ScheduledBatch(
            contexts + self.queue,
            [one for one in self.running if one.state is RequestState.GENERATION],
        )
        self.queue = []
        self.kv.prepare_resources(batch)
        self.queue += batch.refused_requests
        for request in batch.loading_requests:
            self.loading[request.request_id] = request
        for request in batch.requests:
            if request not in self.running:
                self.running.append(request)
            left = request.num_tokens - self._first(request)
            request.num_scheduled_tokens = min(left, self.chunk) + len(request.draft_tokens)
        return batch

    def _first(self, request: LlmRequest) -> int:
        return max(request.num_computed_tokens, request.num_external_tokens)

    def forward(self, batch: ScheduledBatch) -> dict[int, int]:
        if not batch.requests:
            return {}
        for layer in range(LAYERS):
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
        kv = self.kv.pool[:, layer]
        ids = self.kv.blocks[request.request_id]
        tokens = request.tokens.view
        before = 0.0 if first == 0 else float(kv[ids[(first - 1) // T], 0, (first - 1) % T])
        for position in range(first, min(first + request.num_scheduled_tokens, len(tokens))):
            text = f"{before!r} {int(tokens[position])} {layer}"
            before = float(zlib.crc32(text.encode()))
            kv[ids[position // T], :, position % T] = before

    def token(self, request: LlmRequest) -> int:
        ids = self.kv.blocks[request.request_id]
        # [blocks, layers, 2, T] -> [layers, 2, tokens]
        seen = self.kv.pool[ids].permute(1, 2, 0, 3).reshape(LAYERS, 2, -1)
        return zlib.crc32(seen[:, :, : request.num_tokens].contiguous().numpy().tobytes()) % 97

    def _advance(
        self, batch: ScheduledBatch, failed_loads: Mapping[int, int], logits: Mapping[int, int]
    ) -> None:
        for request in batch.requests:
            request_id = request.request_id
            if request_id in failed_loads:
                continue
            if request.num_external_tokens:
                self.store_tokens[request_id] += (
                    request.num_external_tokens - request.num_computed_tokens
                )
            end = self._first(request) + request.num_scheduled_tokens - len(request.draft_tokens)
            request.num_computed_tokens, request.num_external_tokens = end, 0
            self.kv.update_resources(ScheduledBatch([request]))
            if request_id in logits:
                request.append_tokens(np.array([logits[request_id]], np.int32))
                request.state = RequestState.GENERATION
                if request.num_generated_tokens >= request.sampling_params.max_tokens:
                    self._finish(request)

    def _settle(self, outcome: StepOutcome) -> None:
        for request_id, valid in (outcome.loaded | outcome.failed).items():
            request = self.requests.get(request_id)
            if request is None or request.state is RequestState.FINISHED:
                continue
            self.store_tokens[request_id] += valid - request.num_computed_tokens
            request.num_computed_tokens, request.num_external_tokens = valid, 0
            if self.loading.pop(request_id, None) is not None:
                request.state = RequestState.CONTEXT
                self.running.append(request)
            if request_id in outcome.requeue:
                self.preempt(request)
        for request_id in outcome.saved:
            request = self.saving.pop(request_id)
            request.state = RequestState.FINISHED
            self.kv.free_resources(request)

    def preempt(self, request: LlmRequest) -> None:
        self.manager.request_reset(request)
        self.kv.free_resources(request)
        self.running.remove(request)
        request.state = RequestState.QUEUED
        self.queue.append(request)

    def _finish(self, request: LlmRequest, *, aborted: bool = False) -> None:
        holds = request.request_id in self.kv.blocks
        for requests in (self.running, self.queue):
            if request in requests:
                requests.remove(request)
        self.loading.pop(request.request_id, None)
        if self.manager.request_finished(request, aborted=aborted):
            request.state = RequestState.SAVING
            self.saving[request.request_id] = request
            return
        request.state = RequestState.FINISHED
        if holds:
            self.kv.free_resources(request)


def reference(prompt: Sequence[int], max_tokens: int = 1) -> list[int]:
    """The answer without any connector."""
    return _plain_run(prompt, max_tokens)[0].tokens.view[len(prompt) :].tolist()


def sound_blocks(prompt: Sequence[int]) -> Tensor:
    """The blocks of `prompt` with the right KV."""
    return _plain_run(prompt, 1)[1].pool[: -(-len(prompt) // T)]


def _plain_run(prompt: Sequence[int], max_tokens: int) -> tuple[LlmRequest, PlainKv]:
    engine = object.__new__(BenchEngine)
    engine.kv = kv = PlainKv(256)
    tokens = np.array(prompt, np.int32)
    request = LlmRequest(0, tokens, chain_root=DIGEST, tokens_per_block=T)
    for _ in range(max_tokens):
        first = request.num_generated_tokens == 0
        batch = ScheduledBatch([request], []) if first else ScheduledBatch([], [request])
        kv.prepare_resources(batch)
        request.num_scheduled_tokens = request.num_tokens - request.num_computed_tokens
        for layer in range(LAYERS):
            engine.write(request, layer)
        token = engine.token(request)
        request.num_computed_tokens = request.num_tokens
        request.append_tokens(np.array([token], np.int32))
    return request, kv
