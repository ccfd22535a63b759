"""An engine without a model: enough to drive connectors.

The "KV" of a position, and the next token, are checksums over KV that is read from the pools, see
`bench_rank` and `window_engine`. So any wrong byte in a block that is used changes the answer.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Self

import numpy as np
from bench_kv import LAYERS, LAYOUT, GroupKv, Layouts, PlainKv, T
from bench_rank import BenchModel, Share, Work
from torch import Tensor

from kvconnect.backend import Backend
from kvconnect.config import KvCacheConfig, KvCacheConnectorConfig
from kvconnect.connector.data import LlmArgs
from kvconnect.connector.ranks.communicator import Communicator
from kvconnect.connector.runtime.manager import KvCacheConnectorManager
from kvconnect.connector.runtime.transfers import StepOutcome
from kvconnect.errors import ConnectorContractError
from kvconnect.keys import Namespace, Shard, root_key
from kvconnect.request import LlmRequest, RequestState, SamplingParams, ScheduledBatch

__all__ = ["DIGEST", "LAYERS", "LAYOUT", "BenchEngine", "PlainKv", "T", "llm_args", "new_request"]

DIGEST = b"d" * 32


def llm_args(
    store: str | Backend | KvCacheConnectorConfig,
    layouts: Layouts = (LAYOUT,),
    *,
    enable_block_reuse: bool = True,
    shard: Shard = Shard(),
    **settings,
) -> LlmArgs:
    """What a connector for `layouts` is built with; lookups are late only where a test says so."""
    settings = {"lookup_timeout_ms": 60_000.0} | settings
    if isinstance(store, str):
        config = KvCacheConnectorConfig(url=store, **settings)
    elif isinstance(store, Backend):
        config = KvCacheConnectorConfig(backend=store, **settings)
    else:
        config = store
    cache = KvCacheConfig(tokens_per_block=T, enable_block_reuse=enable_block_reuse)
    return LlmArgs("model", cache, config, layouts, DIGEST, shard)


def new_request(
    request_id: int,
    prompt: Sequence[int],
    layouts: Layouts = (LAYOUT,),
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


class BenchEngine:
    """Steps a connector manager as an engine does. Single-threaded: a test calls `step`."""

    _ids = count()

    def __init__(
        self,
        args: LlmArgs,
        *,
        kv: GroupKv | None = None,
        model: BenchModel | None = None,
        chunk: int = 1000,
        communicator: Communicator | None = None,
    ) -> None:
        self.kv = kv or PlainKv()
        self.kv.chunk = chunk
        self.model = model or BenchModel(LAYOUT, self.kv.pools[0])
        self.key_layouts = self.kv.layouts
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
        layouts = self.key_layouts
        request = new_request(next(self._ids), prompt, layouts, max_tokens, salt)
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
            self.kv.held[request.request_id],
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
        shares = [self.share(one) for one in batch.requests]
        for layer in range(self.model.num_layers):
            self.manager.wait_for_layer_load(layer)
            for share in shares:
                self.model.compute(share, layer)
            self.manager.save_kv_layer(layer)
        self.manager.end_forward()
        return self.sample(shares)

    def sample(self, shares: Sequence[Share]) -> dict[int, int]:
        """The tokens behind `shares`, by request."""
        return {one: digest % 97 for one, digest in self.model.digests(shares).items()}

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
        holds = request.request_id in self.kv.held
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
    kv = PlainKv(256)
    return computed(prompt, kv, BenchModel(LAYOUT, kv.pool), max_tokens), kv


def computed(
    prompt: Sequence[int], kv: GroupKv, model: BenchModel, max_tokens: int = 1
) -> LlmRequest:
    """`prompt` answered without any connector; its KV is in `kv`."""
    request = new_request(0, prompt, kv.layouts)
    for _ in range(max_tokens):
        first = request.num_generated_tokens == 0
        batch = ScheduledBatch([request], []) if first else ScheduledBatch([], [request])
        kv.prepare_resources(batch)
        begin, tokens = request.num_computed_tokens, request.tokens.view.tolist()
        share = Share(0, begin, len(tokens), tokens, kv.held[0])
        for layer in range(model.num_layers):
            model.compute(share, layer)
        request.num_computed_tokens = len(tokens)
        request.append_tokens(np.array([model.digests([share])[0] % 97], np.int32))
    return request
