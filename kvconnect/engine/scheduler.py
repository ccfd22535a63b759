"""Which requests a step works on: continuous batching under one of two capacity policies."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal, TypeAlias, get_args

from kvconnect.cache.resource_manager import BaseKVCacheManager
from kvconnect.engine.drafts import NO_DRAFTS, NgramDrafter
from kvconnect.engine.model.forward_step import first_scheduled_token
from kvconnect.errors import ConfigurationError, OutOfBlocks, nearest
from kvconnect.request import LlmRequest, RequestState, ScheduledBatch

__all__ = ["Scheduler", "SchedulingPolicy"]

SchedulingPolicy: TypeAlias = Literal["guaranteed_no_evict", "max_utilization"]
"""TensorRT-LLM's capacity scheduler policies."""


class Scheduler:
    """First come, first served, under a budget of tokens per step and a policy for blocks.

    ``guaranteed_no_evict`` admits a request only if what all admitted ones still need to run to
    their end, and what it needs itself, is free: nothing that runs is ever evicted for another.
    Reuse only lowers what a request takes, so that holds without knowing how much is reused.

    ``max_utilization`` admits a request as soon as its prompt fits beside what the running ones
    need in this step. When one of those finds no block later, the last admitted one is preempted:
    never the one that runs longest, so that one always gets to its end.

    Attributes:
        waiting: hold no blocks.
        running: their prompt is computed, or they generate; in order of admission.
        loading: a load in the background fills their blocks; by request id.
        saving: finished, their blocks are kept until they are saved; by request id.

    Raises:
        ConfigurationError: an unknown policy.
    """

    def __init__(
        self,
        kv: BaseKVCacheManager,
        *,
        max_num_tokens: int,
        max_batch_size: int,
        policy: SchedulingPolicy = "guaranteed_no_evict",
        drafter: NgramDrafter | None = None,
    ) -> None:
        if policy not in get_args(SchedulingPolicy):
            raise ConfigurationError(
                f"scheduling: {policy!r} is unknown; "
                f"{nearest(str(policy), get_args(SchedulingPolicy))}"
            )
        self._kv = kv
        kv.expect_chunks(max_num_tokens)
        self._max_num_tokens = max_num_tokens
        # Every running request gets at least one token of each step's budget.
        self._max_batch_size = min(max_batch_size, max_num_tokens)
        self._guaranteed = policy == "guaranteed_no_evict"
        self._drafter = drafter
        self.waiting: deque[LlmRequest] = deque()
        self.running: list[LlmRequest] = []
        self.loading: dict[int, LlmRequest] = {}
        self.saving: dict[int, LlmRequest] = {}

    def schedule(self) -> ScheduledBatch:
        """The next step's batch, admitted and with ``num_scheduled_tokens`` set.

        Takes from `waiting`; the admitted are in `running`, or in `loading`, afterwards.

        Raises:
            OutOfBlocks: a running request has no room to go on. Nothing was admitted: preempt
                `last_admitted` and call again.
        """
        generation = [r for r in self.running if r.state is RequestState.GENERATION]
        context = [r for r in self.running if r.state is not RequestState.GENERATION]
        self._propose(generation, context)
        batch = ScheduledBatch(context, generation)
        if batch.requests:
            self._prepare_running(batch)
        # What runs has its blocks: what is left may go to those that wait.
        self._admit(batch)
        self._share_budget(batch)
        return batch

    def resume(self, request: LlmRequest) -> None:
        """The load of `request` ended: the rest of its prompt can be computed."""
        del self.loading[request.request_id]
        request.state = RequestState.CONTEXT
        self.running.append(request)

    def remove(self, request: LlmRequest) -> None:
        """`request` is not to be scheduled any more."""
        if request.state is RequestState.QUEUED:
            self.waiting.remove(request)
        elif request.state is RequestState.LOADING:
            del self.loading[request.request_id]
        else:
            self.running.remove(request)

    def put_back(self, request: LlmRequest) -> None:
        """`request` lost its blocks: it is admitted again before all others that wait."""
        self.remove(request)
        request.state = RequestState.QUEUED
        request.num_computed_tokens = 0
        request.num_external_tokens = 0
        request.num_scheduled_tokens = 0
        request.draft_tokens = NO_DRAFTS
        self.waiting.appendleft(request)

    def last_admitted(self) -> LlmRequest | None:
        """Whom to preempt for room; ``None``: only one runs, which must get to its end."""
        return self.running[-1] if len(self.running) > 1 else None

    def one_too_many(self) -> LlmRequest | None:
        """The last admitted running request, if a guarantee was given that holds no more.

        That happens only when a failed load keeps blocks that no request may use.
        """
        if self._guaranteed and self.running and not self._fits([]):
            return self.running[-1]
        return None

    # ------------------------------------------------------------------ what runs

    def _propose(self, generation: list[LlmRequest], context: list[LlmRequest]) -> None:
        """Drafts for greedy requests, within the budget and never beyond ``max_tokens``."""
        if self._drafter is None:
            return
        spare = self._max_num_tokens - len(generation) - len(context)
        for request in generation:
            request.draft_tokens = NO_DRAFTS
            params = request.sampling_params
            if params.temperature > 0:
                continue
            # One token comes with every step anyway.
            useful = params.max_tokens - request.num_generated_tokens - 1
            limit = min(spare, useful)
            request.draft_tokens = self._drafter.propose(request.tokens.view, limit)
            spare -= len(request.draft_tokens)

    def _prepare_running(self, batch: ScheduledBatch) -> None:
        try:
            self._kv.prepare_resources(batch)
        except OutOfBlocks:
            drafted = [one for one in batch.generation_requests if len(one.draft_tokens)]
            if not drafted:
                raise
            # No request is preempted for guesses.
            for request in drafted:
                request.draft_tokens = NO_DRAFTS
            self._kv.prepare_resources(batch)

    # ------------------------------------------------------------------ what waits

    def _admit(self, batch: ScheduledBatch) -> None:
        """Add to `batch` those from `waiting` that fit."""
        seats = self._max_batch_size - len(self.running) - len(self.loading)
        tokens = self._max_num_tokens - sum(
            1 + len(request.draft_tokens) for request in batch.generation_requests
        )
        tokens -= sum(map(_remaining, batch.context_requests))
        if not self.waiting or seats <= 0 or tokens <= 0:
            return
        if self._guaranteed:
            self._take_in(self._candidates(seats, tokens), batch)
        else:
            self._fill(batch, seats, tokens)

    def _candidates(self, seats: int, tokens: int) -> list[LlmRequest]:
        """Takes those from `waiting` that fit, in blocks and in tokens, before any reuse."""
        candidates: list[LlmRequest] = []
        while self.waiting and len(candidates) < seats and tokens > 0:
            if not self._fits([*candidates, self.waiting[0]]):
                break
            tokens -= self.waiting[0].num_tokens
            candidates.append(self.waiting.popleft())
        return candidates

    def _fits(self, candidates: Iterable[LlmRequest]) -> bool:
        """Whether all that is admitted, and `candidates`, can run to its end."""
        requests = [*self.running, *self.loading.values(), *candidates]
        needs = zip(*map(self._kv.needed_blocks, requests), strict=True)
        return self._kv.ensure_free([sum(blocks) for blocks in needs])

    def _fill(self, batch: ScheduledBatch, seats: int, tokens: int) -> None:
        """Take in one after the other, until the first for whose prompt there is no room."""
        while self.waiting and seats > 0 and tokens > 0:
            request = self.waiting.popleft()
            if not self._take_in([request], batch):
                break
            seats -= 1
            if request.state is not RequestState.LOADING:
                tokens -= _remaining(request)

    def _take_in(self, candidates: list[LlmRequest], batch: ScheduledBatch) -> bool:
        """Have `candidates` admitted into `batch`; False if one was refused, which goes back."""
        if not candidates:
            return True
        admission = ScheduledBatch(candidates)
        self._kv.prepare_resources(admission)
        self.waiting.extendleft(reversed(admission.refused_requests))
        for request in admission.loading_requests:
            self.loading[request.request_id] = request
        self.running += admission.context_requests
        batch.context_requests += admission.context_requests
        batch.loading_requests += admission.loading_requests
        return not admission.refused_requests

    # ------------------------------------------------------------------ the budget

    def _share_budget(self, batch: ScheduledBatch) -> None:
        budget = self._max_num_tokens
        for request in batch.generation_requests:
            request.num_scheduled_tokens = 1 + len(request.draft_tokens)
            budget -= request.num_scheduled_tokens
        behind = len(batch.context_requests)
        for request in batch.context_requests:
            behind -= 1
            request.num_scheduled_tokens = min(_remaining(request), budget - behind)
            budget -= request.num_scheduled_tokens


def _remaining(request: LlmRequest) -> int:
    return request.num_tokens - first_scheduled_token(request)
