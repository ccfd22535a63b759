"""Schedules the requests of a step: continuous batching under one of two capacity policies."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, TypeAlias, get_args

from kvconnect.cache.resource_manager import BaseKVCacheManager
from kvconnect.engine.beside_loads import BesideLoads
from kvconnect.engine.block_room import have_room, reserve_beside
from kvconnect.engine.common_prefixes import CommonPrefixes, brings_prefix
from kvconnect.engine.model.sequence_step import first_scheduled_token, remaining_tokens
from kvconnect.engine.sampling.drafts import NO_DRAFTS, NgramDrafter, NgramSpeculation, set_drafts
from kvconnect.engine.snapshots import snapshot_end
from kvconnect.errors import ConfigurationError, OutOfBlocks, nearest
from kvconnect.request import LlmRequest, RequestState, ScheduledBatch
from kvconnect.weak import weakly

SchedulingPolicy: TypeAlias = Literal["guaranteed_no_evict", "max_utilization"]
"""TensorRT-LLM's capacity scheduler policies."""


class Scheduler:
    """A scheduler: first come, first served, under a token budget per step and a block policy.

    ``guaranteed_no_evict`` admits a request only if the blocks are free that it and all admitted
    ones still need to run to their end: no running request is ever preempted for another. Reuse
    only lowers a request's demand, so the policy need not know how much is reused. Requests whose
    load waits for other loads keep their position in the queue while others overtake; the next step
    tries them first.

    ``max_utilization`` admits a request as soon as its prompt fits beside what the running ones
    need in this step. If one of those later finds no block, the last admitted one is preempted. The
    one that runs longest is never preempted, so it always finishes.

    Without `divide_prompts` a step computes the whole rest of a prompt or none of it. Only a prompt
    longer than a whole step (of a preempted request, with its generated tokens) is divided
    nevertheless. A prompt that does not fit beside the running ones waits, and no other overtakes
    it.

    A request whose load overlaps with computing gets the tokens of the budget that no other uses.
    Chunks end where a snapshot of recurrent states is due; see `snapshot_end` for `stepped`.

    With `share_prefixes` prompts that begin alike compute their common part once: the first ends a
    chunk there, and the others wait for it.

    Attributes:
        waiting: queued requests, which hold no blocks.
        running: requests that compute their prompt or generate, in order of admission.
        loading: requests whose blocks a background load fills, by request id.
        saving: finished requests whose blocks are kept until they are saved, by request id.
        beside_loads: the pace of steps and loads, and the chunks computed beside loads.
        send_back: preempts a request; set by the engine, which notifies the connector.

    Raises:
        ConfigurationError: an unknown policy, or a cache manager that cannot rewind drafts.
    """

    def __init__(
        self,
        kv: BaseKVCacheManager,
        *,
        max_num_tokens: int,
        max_batch_size: int,
        policy: SchedulingPolicy = "guaranteed_no_evict",
        speculation: NgramSpeculation | None = None,
        share_prefixes: bool = True,
        divide_prompts: bool = True,
        stepped: bool = False,
    ) -> None:
        if policy not in get_args(SchedulingPolicy):
            raise ConfigurationError(
                f"scheduling: {policy!r} is unknown; "
                f"{nearest(str(policy), get_args(SchedulingPolicy))}"
            )
        if speculation is not None and not kv.supports_connector:
            raise ConfigurationError(
                f"speculative: rejected drafts are rewound, which {type(kv).__name__} does not say "
                "it can (supports_connector is False)"
            )
        self._kv = kv
        kv.expect_chunks(max_num_tokens)
        self._max_num_tokens = max_num_tokens
        # Every running request gets at least one token of each step's budget.
        self._max_batch_size = min(max_batch_size, max_num_tokens)
        self._share_prefixes = share_prefixes and divide_prompts
        self._divide_prompts = divide_prompts
        self._ends = partial(snapshot_end, kv, stepped=stepped)
        self._guaranteed = policy == "guaranteed_no_evict"
        self._drafter = None if speculation is None else NgramDrafter(speculation)
        self.beside_loads = BesideLoads(
            max_num_tokens,
            weakly(self._num_requests),
            weakly(self._reserve_beside),
            self._ends,
            stepped=stepped,
        )
        self.waiting: deque[LlmRequest] = deque()
        self.running: list[LlmRequest] = []
        self.loading: dict[int, LlmRequest] = {}
        self.saving: dict[int, LlmRequest] = {}
        self.send_back: Callable[[LlmRequest], None]
        self._failed: dict[int, Exception] = {}  # errors of requests that are in no queue any more
        self._ending: set[int] = set()  # the same errors, taken by the engine

    def schedule(self) -> ScheduledBatch:
        """Returns the next step's batch, admitted and with ``num_scheduled_tokens`` set.

        Moves admitted requests from `waiting` to `running` or `loading`.

        Raises:
            OutOfBlocks: a running request finds no block to continue. No request was admitted:
                preempt `last_admitted` and call again.
        """
        generation = [r for r in self.running if r.state is RequestState.GENERATION]
        self._send_back_crowded()
        context = [r for r in self.running if r.state is not RequestState.GENERATION]
        if self._drafter is not None:
            spare = self._max_num_tokens - len(generation) - len(context)
            set_drafts(self._drafter, generation, spare, self._kv.next_state_end)
        batch = ScheduledBatch(generation_requests=generation)
        batch.context_requests += self._fitting(context, batch)
        if batch.requests:
            self._prepare_running(batch)
        # Running requests have their blocks; waiting requests may take the rest.
        prefixes = CommonPrefixes(self._kv, enabled=self._share_prefixes)
        if len(batch.context_requests) == len(context):
            self._admit(batch, prefixes)
        self._share_budget(batch, prefixes)
        for request in self.beside_loads.add_chunk(batch, self.loading.values()):
            self.resume(request)
            request.forget_load()
        return batch

    def _num_requests(self) -> tuple[int, int]:
        computing = sum(one.state is RequestState.CONTEXT for one in self.running)
        return max(1, len(self.waiting) + len(self.loading) + computing), len(self.running)

    def resume(self, request: LlmRequest) -> None:
        """Resumes `request`, whose load ended: the rest of its prompt can be computed."""
        del self.loading[request.request_id]
        self.beside_loads.end(request)
        request.state = RequestState.CONTEXT
        self.running.append(request)

    def take_errors(self) -> dict[int, Exception]:
        """Returns by request id the cache manager's errors for single requests since the last call.

        These requests are in no queue any more; the engine ends them.
        """
        taken, self._failed = self._failed, {}
        self._ending.update(taken)
        return taken

    def remove(self, request: LlmRequest) -> None:
        """Removes `request` from its queue."""
        if request.request_id in self._ending:
            self._ending.remove(request.request_id)
        elif request.state is RequestState.QUEUED:
            self.waiting.remove(request)
        elif request.state is RequestState.LOADING:
            del self.loading[request.request_id]
            self.beside_loads.end(request)
        else:
            self.running.remove(request)

    def put_back(self, request: LlmRequest) -> None:
        """Queues `request`, which lost its blocks, before all waiting requests."""
        self.remove(request)
        request.lose_blocks()
        self.waiting.appendleft(request)

    def last_admitted(self) -> LlmRequest | None:
        """Returns the request to preempt for blocks; ``None`` if only one runs.

        If only one runs, it is a request that computes beside its load; otherwise the running
        request would wait for a store.
        """
        if len(self.running) > 1:
            return self.running[-1]
        beside = [one for one in self.loading.values() if one.load_end]
        return beside[-1] if self.running and beside else None

    def one_too_many(self) -> LlmRequest | None:
        """Returns the last admitted running request, if not all running ones can finish any more.

        That happens only if a failed load holds blocks that no request may use.
        """
        if self._guaranteed and self.running and not self._fits([]):
            return self.running[-1]
        return None

    # ------------------------------------------------------------------ what runs

    def _fitting(self, context: list[LlmRequest], batch: ScheduledBatch) -> list[LlmRequest]:
        """Returns those of `context`, from the first on, that this step can compute."""
        chosen: list[LlmRequest] = []
        _, tokens = self._room(batch)
        for request in context:
            if not self._goes_into(tokens, remaining_tokens(request)):
                break
            chosen.append(request)
            tokens -= remaining_tokens(request)
        return chosen

    def _goes_into(self, tokens: int, wanted: int) -> bool:
        """Returns whether a step that has `tokens` left computes `wanted` prompt tokens."""
        return self._divide_prompts or wanted <= tokens or tokens == self._max_num_tokens

    def _send_back_crowded(self) -> None:
        """Sends back requests that lack blocks for the tokens that their load missed."""
        for request in [one for one in self.running if one.load_end]:
            end = min(request.num_computed_tokens + self._max_num_tokens, request.joins_load_at)
            if not self._reserve_beside(request, end):
                self.send_back(request)

    def _reserve_beside(self, request: LlmRequest, num_tokens: int) -> bool:
        held, guaranteed = [*self.running, *self.loading.values()], self._guaranteed
        return reserve_beside(self._kv, request, num_tokens, held, guaranteed=guaranteed)

    def _prepare_running(self, batch: ScheduledBatch) -> None:
        try:
            self._kv.prepare_resources(batch)
        except OutOfBlocks:
            drafted = [one for one in batch.generation_requests if len(one.draft_tokens)]
            if not drafted:
                raise
            # No request is preempted for drafts.
            for request in drafted:
                request.draft_tokens = NO_DRAFTS
            self._kv.prepare_resources(batch)

    # ------------------------------------------------------------------ what waits

    def _admit(self, batch: ScheduledBatch, prefixes: CommonPrefixes) -> None:
        """Adds waiting requests to `batch` that fit and need not wait for another's prefix."""
        seats, tokens = self._room(batch)
        if self.waiting and seats > 0 and tokens > 0:
            # All of these end their prompts in this step, so the budget has tokens left.
            prefixes.add([*batch.context_requests, *filter(brings_prefix, self.loading.values())])
            if self._guaranteed:
                self._take_in_candidates(batch, prefixes)
            else:
                self._fill(batch, prefixes, seats=seats, tokens=tokens)
        self.waiting.extendleft(reversed(batch.deferred_requests))

    def _room(self, batch: ScheduledBatch) -> tuple[int, int]:
        """Returns the requests and tokens that `batch` can still take; zeros if one is used up."""
        seats = self._max_batch_size - len(self.running) - len(self.loading)
        tokens = self._max_num_tokens - sum(
            1 + len(request.draft_tokens) for request in batch.generation_requests
        )
        return seats, tokens - sum(map(remaining_tokens, batch.context_requests))

    def _take_in_candidates(self, batch: ScheduledBatch, prefixes: CommonPrefixes) -> None:
        """Admits waiting requests that fit, in blocks and tokens, without counting reuse.

        Further requests replace deferred ones, until none is deferred.
        """
        passed = -1
        refused: list[LlmRequest] = []
        while not refused and passed < len(batch.deferred_requests) < self._max_batch_size:
            passed = len(batch.deferred_requests)
            chosen, held = self._candidates(prefixes, *self._room(batch))
            refused = self._take_in([one for one in chosen if one not in held], batch)
            prefixes.discard(one for one in chosen if not brings_prefix(one))
            back = held + refused
            self.waiting.extendleft(one for one in reversed(chosen) if one in back)

    def _candidates(
        self, prefixes: CommonPrefixes, seats: int, tokens: int
    ) -> tuple[list[LlmRequest], list[LlmRequest]]:
        """Removes requests that fit from `waiting`; returns them, and those to hold back."""
        chosen: list[LlmRequest] = []
        held: list[LlmRequest] = []
        while self.waiting and len(chosen) < seats and tokens > 0:
            request = self.waiting[0]
            if not self._is_sound(request):
                continue
            if not self._fits([*chosen, request]) or (held and request.num_tokens > tokens):
                break
            if not self._goes_into(tokens, request.num_tokens):
                break
            chosen.append(self.waiting.popleft())
            tokens -= request.num_tokens
            if prefixes.hold_back(request):
                held.append(request)
            else:
                prefixes.add([request])
        return chosen, held

    def _fits(self, candidates: Iterable[LlmRequest]) -> bool:
        """Returns whether all admitted requests and `candidates` can run to their ends."""
        return have_room(self._kv, [*self.running, *self.loading.values(), *candidates])

    def _fill(
        self, batch: ScheduledBatch, prefixes: CommonPrefixes, *, seats: int, tokens: int
    ) -> None:
        """Admits waiting requests in turn, until the first whose prompt does not fit."""
        held: list[LlmRequest] = []
        refused: list[LlmRequest] = []
        while self.waiting and not refused and seats > 0 and tokens > 0:
            request = self.waiting[0]
            if not self._is_sound(request):
                continue
            if held and (request.num_tokens > tokens or not have_room(self._kv, [*held, request])):
                break
            is_full = len(batch.deferred_requests) >= self._max_batch_size
            if is_full or not self._goes_into(tokens, request.num_tokens):
                break
            self.waiting.popleft()
            if prefixes.hold_back(request):
                held.append(request)
                seats -= 1
                tokens -= request.num_tokens
                continue
            refused = self._take_in([request], batch)
            if request.state is not RequestState.QUEUED:
                seats -= 1
            if brings_prefix(request):
                prefixes.add([request])
            if request.state is RequestState.CONTEXT:
                tokens -= remaining_tokens(request)
        self.waiting.extendleft(reversed(held + refused))

    def _take_in(self, candidates: list[LlmRequest], batch: ScheduledBatch) -> list[LlmRequest]:
        """Admits `candidates` into `batch`; returns those that did not fit."""
        if not candidates:
            return []
        admission = ScheduledBatch(list(candidates))
        try:
            self._kv.prepare_resources(admission)
        except Exception as error:
            if not self._kv.raises_for_requests:
                raise
            return self._take_in_alone(candidates, batch, error)
        for request in admission.loading_requests:
            self.loading[request.request_id] = request
        self.running += admission.context_requests
        batch.context_requests += admission.context_requests
        batch.loading_requests += admission.loading_requests
        batch.deferred_requests += admission.deferred_requests
        return admission.refused_requests

    def _take_in_alone(
        self, candidates: list[LlmRequest], batch: ScheduledBatch, error: Exception
    ) -> list[LlmRequest]:
        """Admits each of `candidates` alone after `error`, to find the request that caused it."""
        if len(candidates) == 1:
            (request,) = candidates
            if isinstance(error, OutOfBlocks) and request.state is RequestState.QUEUED:
                return candidates
            self._failed[request.request_id] = error
            return []
        for request in candidates:
            if request.state is RequestState.QUEUED:
                continue
            if request.state is RequestState.LOADING:
                self.loading[request.request_id] = request
            else:
                self.running.append(request)
            self.send_back(request)
            self.waiting.remove(request)
        refused: list[LlmRequest] = []
        for request in candidates:
            refused += self._take_in([request], batch)
        return refused

    def _is_sound(self, request: LlmRequest) -> bool:
        """Returns whether the manager can compute the demand of `request`; otherwise fails it."""
        try:
            self._kv.needed_blocks(request)
        except Exception as error:
            if not self._kv.raises_for_requests:
                raise
            self.waiting.remove(request)
            self._failed[request.request_id] = error
            return False
        return True

    # ------------------------------------------------------------------ the budget

    def _share_budget(self, batch: ScheduledBatch, prefixes: CommonPrefixes) -> None:
        budget = self._max_num_tokens
        for request in batch.generation_requests:
            request.num_scheduled_tokens = 1 + len(request.draft_tokens)
            budget -= request.num_scheduled_tokens
        for number, request in enumerate(batch.context_requests, 1):
            behind = len(batch.context_requests) - number
            start = first_scheduled_token(request)
            end = min(prefixes.end(request, start), start + budget - behind)
            if request.load_end:
                end = min(end, request.joins_load_at)  # then those up to `load_end` are there
            if self._divide_prompts or request.load_end:
                end = self._ends(request, start, end)
            request.num_scheduled_tokens = end - start
            budget -= request.num_scheduled_tokens
