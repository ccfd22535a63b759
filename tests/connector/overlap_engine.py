"""Engines without a model that compute the beginning of a prompt while its end is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar

from bench_engine import BenchEngine
from bench_kv import PlainKv
from ranks import Pair

from kvconnect.connector.data import LlmArgs
from kvconnect.connector.ranks.communicator import Communicator
from kvconnect.connector.runtime.transfers import StepOutcome
from kvconnect.request import LlmRequest, RequestState, ScheduledBatch


class OverlapKv(PlainKv):
    """Admits requests that compute beside their load."""

    overlaps_loads: ClassVar[bool] = True


class OverlapEngine(BenchEngine):
    """Computes `beside(request)` tokens in each step while a load runs."""

    def __init__(
        self,
        args: LlmArgs,
        *,
        kv: PlainKv | None = None,
        chunk: int = 1000,
        communicator: Communicator | None = None,
    ) -> None:
        config = args.kv_connector_config
        if "overlap_loads" not in config.model_fields_set:
            config = config.model_copy(update={"overlap_loads": True})
        args = replace(args, kv_connector_config=config)
        super().__init__(args, kv=kv or OverlapKv(), chunk=chunk, communicator=communicator)
        self.beside: Callable[[LlmRequest], int] = not_loaded

    def step(self) -> bool:
        return super().step() or any(map(self._beside, self.loading.values()))

    def _beside(self, request: LlmRequest) -> int:
        return min(self.beside(request), self.chunk) if request.load_end else 0

    def schedule(self) -> ScheduledBatch:
        batch = super().schedule()
        for request in batch.context_requests:
            if request.load_end:
                scheduled = min(request.num_scheduled_tokens, not_loaded(request))
                request.num_scheduled_tokens = scheduled
        for request in self.loading.values():
            if request not in batch.loading_requests and (num_tokens := self._beside(request)):
                request.num_scheduled_tokens = num_tokens
                batch.context_requests.append(request)
        return batch

    def _advance(
        self, batch: ScheduledBatch, failed_loads: Mapping[int, int], logits: Mapping[int, int]
    ) -> None:
        super()._advance(batch, failed_loads, logits)
        for request in batch.context_requests:
            if request.state is RequestState.CONTEXT:
                self._join(request)

    def _settle(self, outcome: StepOutcome) -> None:
        for request_id, loaded_from in outcome.loaded_from.items():
            if (request := self.loading.pop(request_id, None)) is not None:
                request.loaded_from = loaded_from
                request.state = RequestState.CONTEXT
                self.running.append(request)
                self._join(request)
        loaded = outcome.loaded.items()
        rest = {one: valid for one, valid in loaded if one not in outcome.loaded_from}
        for request_id in outcome.failed:
            self.requests[request_id].load_end = 0
        super()._settle(replace(outcome, loaded=rest))

    def idle_and_settle(self) -> None:
        """A step without a batch; what ended in it is taken."""
        self.outcomes.append(self.idle_step())
        self._settle(self.outcomes[-1])

    def _join(self, request: LlmRequest) -> None:
        if request.load_end and request.num_computed_tokens >= request.loaded_from:
            gained = max(0, request.load_end - request.num_computed_tokens)
            self.store_tokens[request.request_id] += gained
            request.num_computed_tokens += gained
            request.load_end = request.loaded_from = 0

    def preempt(self, request: LlmRequest) -> None:
        if self.loading.pop(request.request_id, None) is not None:
            self.running.append(request)
        super().preempt(request)
        request.load_end = request.loaded_from = request.num_computed_tokens = 0


def not_loaded(request: LlmRequest) -> int:
    """The tokens of `request` between those that are computed and those that are loaded."""
    return max(0, request.loaded_from - request.num_computed_tokens)


class OverlapPair(Pair):
    """Ranks whose leader computes beside loads."""

    engine = OverlapEngine
