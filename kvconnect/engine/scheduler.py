"""Which requests a step works on: continuous batching without evictions."""

from __future__ import annotations

from collections import deque

from kvconnect.cache.resource_manager import BaseKVCacheManager
from kvconnect.engine.forward_step import first_scheduled_token
from kvconnect.request import LlmRequest, RequestState, ScheduledBatch

__all__ = ["Scheduler"]


class Scheduler:
    """First come, first served, under a budget of tokens per step and a guarantee of blocks.

    A request is admitted only if what all admitted ones still need to run to their end, and what it
    needs itself, is free: nothing that runs is ever evicted for another. Reuse only lowers what a
    request takes, so the guarantee holds without knowing how much is reused.

    Attributes:
        waiting: hold no blocks.
        running: their prompt is computed, or they generate; in order of admission.
        loading: a load in the background fills their blocks; by request id.
        saving: finished, their blocks are kept until they are saved; by request id.
    """

    def __init__(self, kv: BaseKVCacheManager, *, max_num_tokens: int, max_batch_size: int) -> None:
        self._kv = kv
        self._max_num_tokens = max_num_tokens
        # Every running request gets at least one token of each step's budget.
        self._max_batch_size = min(max_batch_size, max_num_tokens)
        self.waiting: deque[LlmRequest] = deque()
        self.running: list[LlmRequest] = []
        self.loading: dict[int, LlmRequest] = {}
        self.saving: dict[int, LlmRequest] = {}

    def schedule(self) -> ScheduledBatch:
        """The next step's batch, admitted and with ``num_scheduled_tokens`` set.

        Takes from `waiting`; the admitted are in `running`, or in `loading`, afterwards.
        """
        generation = [r for r in self.running if r.state is RequestState.GENERATION]
        context = [r for r in self.running if r.state is not RequestState.GENERATION]
        candidates = self._candidates(generation, context)
        batch = ScheduledBatch(context + candidates, generation)
        if not batch.requests:
            return batch
        self._kv.prepare_resources(batch)
        self.waiting.extendleft(reversed(batch.refused_requests))
        for request in batch.loading_requests:
            self.loading[request.request_id] = request
        self.running += batch.context_requests[len(context) :]
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
        self.waiting.appendleft(request)

    def one_too_many(self) -> LlmRequest | None:
        """The last admitted running request, if not all can run to their end any more.

        That happens only when a failed load keeps blocks that nobody may touch.
        """
        if self.running and self._needed_by_admitted() > self._kv.get_num_free_blocks():
            return self.running[-1]
        return None

    def _candidates(
        self, generation: list[LlmRequest], context: list[LlmRequest]
    ) -> list[LlmRequest]:
        """Takes those from `waiting` that fit, in blocks and (before any reuse) in tokens."""
        seats = self._max_batch_size - len(self.running) - len(self.loading)
        tokens = self._max_num_tokens - len(generation) - sum(map(_remaining, context))
        if not self.waiting or seats <= 0 or tokens <= 0:
            return []
        blocks = self._kv.get_num_free_blocks() - self._needed_by_admitted()
        candidates: list[LlmRequest] = []
        while self.waiting and len(candidates) < seats and tokens > 0:
            needed = self._kv.get_needed_resource_to_completion(self.waiting[0])
            if needed > blocks:
                break
            blocks -= needed
            tokens -= self.waiting[0].num_tokens
            candidates.append(self.waiting.popleft())
        return candidates

    def _needed_by_admitted(self) -> int:
        admitted = [*self.running, *self.loading.values()]
        return sum(map(self._kv.get_needed_resource_to_completion, admitted))

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
