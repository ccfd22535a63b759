"""The engine's thread: one step after the other, as long as there is something to do."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from kvconnect.cache.resource_manager import BaseKVCacheManager
from kvconnect.connector.ledger import StepOutcome
from kvconnect.engine.attachment import Attachment
from kvconnect.engine.forward_step import ForwardStep, first_scheduled_token
from kvconnect.engine.handle import RequestProgress
from kvconnect.engine.inbox import Inbox
from kvconnect.engine.model import Model
from kvconnect.engine.output import EngineStats, RequestOutput
from kvconnect.engine.pages import LayerPages
from kvconnect.engine.sampler import Sampler
from kvconnect.engine.scheduler import Scheduler
from kvconnect.engine.stops import FinishReason, StopChecker
from kvconnect.errors import EngineClosed, OutOfBlocks
from kvconnect.request import LlmRequest, RequestState, ScheduledBatch

__all__ = ["Abort", "Close", "Engine", "LiveRequest"]

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request in the engine, and who waits for it."""

    request: LlmRequest
    progress: RequestProgress
    stops: StopChecker
    texts: list[str] = field(default_factory=list)
    first_token_at: float | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request now."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Close:
    """End everything now."""


class Engine:
    """Runs requests to their end. `run` is the body of a thread that owns everything in here.

    Args:
        model: computes.
        kv: the cache manager.
        connector: told of every step.
        scheduler: over the same `kv`.
        inbox: new requests, aborts and the order to close; rung when a transfer ended.
        layers: memory of `kv`.
    """

    def __init__(
        self,
        model: Model,
        kv: BaseKVCacheManager,
        connector: Attachment,
        scheduler: Scheduler,
        inbox: Inbox[LiveRequest | Abort | Close],
        layers: Sequence[LayerPages],
    ) -> None:
        self._model = model
        self._kv = kv
        self._connector = connector
        self._scheduler = scheduler
        self._inbox = inbox
        self._layers = layers
        self._sampler = Sampler()
        self._live: dict[int, LiveRequest] = {}
        self._closing = False
        self.stats = EngineStats(max_blocks=kv.get_max_resource_count())

    def run(self) -> None:
        """Step until told to close, abort what still runs, drain the connector.

        An error in a step ends the engine: every request in it fails with that error, which is
        also the cause of the `EngineClosed` that later ones get.
        """
        error: BaseException | None = None
        try:
            self._step_until_closed()
        except BaseException as caught:  # noqa: BLE001  handed to everybody who waits
            error = caught
            _log.error("the engine stopped: %s", caught, exc_info=caught)
        try:
            self._connector.shutdown()
        except Exception as caught:  # noqa: BLE001  nobody else is there to take it
            error = error or caught
            _log.error("the connector did not shut down: %s", caught, exc_info=caught)
        self._turn_away(error)

    def _step_until_closed(self) -> None:
        while True:
            self._receive()
            if self._closing:
                break
            if not self.step():
                self._inbox.wait(self._connector.wait_seconds())
        for live in list(self._live.values()):
            self._finish(live, "abort")

    def step(self) -> bool:
        """One step of the engine; False if nothing came of it, so that there is time to sleep."""
        # schedule: admit what fits, allocate, share out the budget of tokens
        batch = self._scheduler.schedule()
        # connect: tell the connector, start its loads
        scheduled = bool(batch.requests or batch.loading_requests)
        if scheduled:
            self._connector.begin_step(batch)
        elif not self._connector.expects_news():
            return self._unblock()
        # forward: each layer waits for its loads, writes K/V, attends, offers itself for saving
        logits = self._forward(batch.requests)
        # agree: whatever failed to load gets nothing from this step
        outcome = self._connector.end_step()
        self._advance(batch, outcome)
        self._kv.update_resources(batch)
        # sample: append tokens, stream them, finish
        self._sample(batch, logits)
        # settle: loaded requests resume, saved ones let go
        self._settle(outcome)
        ended = bool(outcome.loaded or outcome.failed or outcome.saved)
        if self._recount_blocks() or scheduled or ended:
            return True
        return self._connector.wait_seconds() is None and self._unblock()

    # ------------------------------------------------------------------ arrive

    def _receive(self) -> None:
        for message in self._inbox.take():
            match message:
                case LiveRequest():
                    self._live[message.request.request_id] = message
                    self._scheduler.waiting.append(message.request)
                    self._connector.on_new_request(message.request)
                case Abort():
                    if live := self._live.get(message.request_id):
                        self._finish(live, "abort")
                case Close():
                    self._closing = True

    # ------------------------------------------------------------------ forward

    def _forward(self, requests: Sequence[LlmRequest]) -> Tensor | None:
        """Logits after each request's last scheduled token, ``[requests, vocab]``."""
        if not requests:
            return None
        tables = self._kv.get_batch_cache_indices(requests)
        step = ForwardStep(
            requests, tables, self._layers, self._connector, device=self._model.device
        )
        logits = self._model.forward(step)
        self.stats.steps += 1
        self._connector.end_forward()
        return logits

    # ------------------------------------------------------------------ agree

    def _advance(self, batch: ScheduledBatch, outcome: StepOutcome) -> None:
        """Move each request's valid position; one whose load failed gets nothing from this step."""
        for request in batch.requests:
            if request.request_id in outcome.failed:
                continue
            if request.num_external_tokens:
                request.reused_store_tokens += (
                    request.num_external_tokens - request.num_computed_tokens
                )
            if request.state is RequestState.CONTEXT:
                request.computed_tokens += request.num_scheduled_tokens
            end = first_scheduled_token(request) + request.num_scheduled_tokens
            request.num_computed_tokens, request.num_external_tokens = end, 0
        for request_id, valid in outcome.failed.items():
            if live := self._live.get(request_id):
                self._note_loaded(live.request, valid)

    # ------------------------------------------------------------------ sample

    def _sample(self, batch: ScheduledBatch, logits: Tensor | None) -> None:
        """The next token of those whose tokens are all computed: nothing after a failed load."""
        rows = [
            row
            for row, request in enumerate(batch.requests)
            if request.num_computed_tokens == request.num_tokens
        ]
        if logits is None or not rows:
            return
        requests = [batch.requests[row] for row in rows]
        chosen = logits if len(rows) == len(logits) else logits[rows]
        for request, token in zip(requests, self._sampler.sample(chosen, requests), strict=True):
            request.append_tokens(np.array([token], np.int32))
            request.state = RequestState.GENERATION
            self._emit(self._live[request.request_id], token)

    def _emit(self, live: LiveRequest, token: int) -> None:
        if live.first_token_at is None:
            live.first_token_at = time.perf_counter()
        status = live.stops.add(token)
        live.texts.append(status.text)
        live.progress.add(token, status.text)
        if status.finish_reason is not None:
            self._finish(live, status.finish_reason)

    def _finish(self, live: LiveRequest, reason: FinishReason) -> None:
        """`live` is over: its blocks go, or stay until they are saved; its waiter is told."""
        request = live.request
        rest = live.stops.abort() if reason == "abort" else ""
        live.texts.append(rest)
        holds_blocks = request.state is not RequestState.QUEUED
        self._scheduler.remove(request)
        self._sampler.forget(request)
        keep = self._connector.request_finished(request, aborted=reason == "abort")
        request.kv_transfer_params = (
            self._connector.get_kv_transfer_params(request) or request.kv_transfer_params
        )
        if keep:
            request.state = RequestState.SAVING
            self._scheduler.saving[request.request_id] = request
        else:
            request.state = RequestState.FINISHED
            if holds_blocks:
                self._kv.free_resources(request)
        del self._live[request.request_id]
        self._count(request)
        live.progress.finish(_output(live, reason), rest)

    # ------------------------------------------------------------------ settle

    def _settle(self, outcome: StepOutcome) -> None:
        """Loaded requests resume, those without blocks queue again, saved ones let go."""
        for request_id, valid in outcome.loaded.items():
            if request := self._scheduler.loading.get(request_id):
                self._note_loaded(request, valid)
                self._scheduler.resume(request)
        for request_id in outcome.saved:
            if request := self._scheduler.saving.pop(request_id, None):
                request.state = RequestState.FINISHED
                self._kv.free_resources(request)
        if outcome.failed:
            self._settle_failed(outcome)

    def _settle_failed(self, outcome: StepOutcome) -> None:
        for request_id in outcome.failed:
            live = self._live.get(request_id)
            if live is None:
                continue
            if request_id in outcome.requeue:
                self._send_back(live.request)
            elif live.request.state is RequestState.LOADING:
                self._scheduler.resume(live.request)
        while (victim := self._scheduler.one_too_many()) is not None:
            self._send_back(victim)

    def _note_loaded(self, request: LlmRequest, valid: int) -> None:
        """A load ended with `valid` leading tokens present."""
        request.reused_store_tokens += max(0, valid - request.num_computed_tokens)
        request.num_computed_tokens, request.num_external_tokens = valid, 0

    def _send_back(self, request: LlmRequest) -> None:
        """Preempt: what is computed stays in the cache as long as nobody needs the blocks."""
        self._connector.request_reset(request)
        self._kv.free_resources(request)
        self._scheduler.put_back(request)
        self.stats.preemptions += 1

    def _recount_blocks(self) -> bool:
        """Whether more are free: those held for a transfer come back without any request."""
        before = self.stats.free_blocks
        self.stats.free_blocks = self._kv.get_num_free_blocks()
        return self.stats.free_blocks > before

    def _unblock(self) -> bool:
        """Nothing runs and nothing is to be hoped for: then what waits will never fit."""
        if not self._scheduler.waiting:
            return False
        request = self._scheduler.waiting[0]
        needed = self._kv.get_needed_resource_to_completion(request)
        self._scheduler.remove(request)
        self._sampler.forget(request)
        self._connector.request_finished(request, aborted=True)
        request.state = RequestState.FINISHED
        live = self._live.pop(request.request_id)
        live.progress.fail(
            OutOfBlocks(
                f"request {request.request_id} needs {needed} KV blocks; "
                f"{self._kv.get_num_free_blocks()} are free though no other request holds any"
            )
        )
        return True

    # ------------------------------------------------------------------ account

    def _count(self, request: LlmRequest) -> None:
        stats = self.stats
        stats.finished_requests += 1
        stats.prompt_tokens += request.prompt_len
        stats.generated_tokens += request.num_generated_tokens
        stats.computed_tokens += request.computed_tokens
        stats.reused_device_tokens += request.reused_device_tokens
        stats.reused_store_tokens += request.reused_store_tokens

    def _turn_away(self, error: BaseException | None) -> None:
        """Nothing more is taken in; whoever still waits is told why."""
        left = self._inbox.close(error)
        late = error or EngineClosed("the engine was closed before the request was taken in")
        for message in left:
            if isinstance(message, LiveRequest):
                message.progress.fail(late)
        for live in self._live.values():
            live.progress.fail(late)
        self._live.clear()


def _output(live: LiveRequest, reason: FinishReason) -> RequestOutput:
    request = live.request
    tokens = request.tokens.view.tolist()
    ttft = None if live.first_token_at is None else live.first_token_at - request.arrived_at
    return RequestOutput(
        request_id=request.request_id,
        prompt_token_ids=tuple(tokens[: request.prompt_len]),
        output_token_ids=tuple(tokens[request.prompt_len :]),
        output_text="".join(live.texts),
        finish_reason=reason,
        prompt_tokens=request.prompt_len,
        computed_tokens=request.computed_tokens,
        reused_device_tokens=request.reused_device_tokens,
        reused_store_tokens=request.reused_store_tokens,
        ttft_ms=None if ttft is None else 1000 * ttft,
        kv_transfer_params=request.kv_transfer_params,
    )
