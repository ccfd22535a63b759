"""What a step tells the connector's scheduler: each thing about a request once."""

from __future__ import annotations

from dataclasses import dataclass

from kvconnect.cache.resource_manager import BaseKVCacheManager
from kvconnect.connector.data import RequestData, SchedulerOutput
from kvconnect.request import ExternalMatch, LlmRequest, ScheduledBatch

__all__ = ["RequestRecord", "StepReporter"]


@dataclass(slots=True, eq=False)
class RequestRecord:
    """What the runtime knows of a live request.

    Attributes:
        request: the engine's.
        holds_blocks: it was admitted and has not given its blocks back.
        offer: what the connector supplies for this admission, until its load starts.
        reported: it was in `new_requests` since its blocks were allocated.
        num_tokens, num_blocks: how many were reported.
    """

    request: LlmRequest
    holds_blocks: bool = False
    offer: ExternalMatch | None = None
    reported: bool = False
    num_tokens: int = 0
    num_blocks: int = 0

    def admitted(self) -> None:
        """It holds blocks that were never reported."""
        self.holds_blocks = True
        self.reported = False
        self.num_tokens = self.num_blocks = 0

    def evicted(self) -> None:
        """It holds none any more."""
        self.admitted()
        self.holds_blocks = False
        self.offer = None


class StepReporter:
    """Builds the `SchedulerOutput` of a step from its batch and what was reported before."""

    def __init__(self, kv: BaseKVCacheManager, tokens_per_block: int) -> None:
        self._kv = kv
        self._tokens_per_block = tokens_per_block

    def report(
        self, batch: ScheduledBatch, records: dict[int, RequestRecord], loading: list[LlmRequest]
    ) -> SchedulerOutput:
        """What is new in `batch`; changes `records` to say that it was reported.

        Args:
            batch: what the step computes.
            records: of its requests.
            loading: those whose load in the background starts in this step.
        """
        output = SchedulerOutput()
        for request in loading:
            output.loading_requests.append(self._whole(request, scheduled=0))
        for requests in (batch.context_requests, batch.generation_requests):
            for request in requests:
                record = records[request.request_id]
                if record.reported:
                    output.cached_requests.append(self._increment(request, record))
                    continue
                data = self._whole(request, scheduled=request.num_scheduled_tokens)
                record.reported = True
                record.num_tokens = len(data.new_tokens)
                record.num_blocks = len(data.new_block_ids)
                output.new_requests.append(data)
        return output

    def block_ids(self, request: LlmRequest) -> list[int]:
        """Ids of the blocks that `request` holds, as plain ints."""
        indices = self._kv.get_batch_cache_indices([request])[request.request_id]
        return [int(block) for block in indices]

    def _whole(self, request: LlmRequest, scheduled: int) -> RequestData:
        return self._data(request, 0, self.block_ids(request), 0, scheduled)

    def _increment(self, request: LlmRequest, record: RequestRecord) -> RequestData:
        scheduled = request.num_scheduled_tokens
        # Most decode steps add a token and no block: then nothing is asked of the block manager.
        needed = -(-(request.num_computed_tokens + scheduled) // self._tokens_per_block)
        new_ids: list[int] = []
        if needed > record.num_blocks:
            new_ids = self.block_ids(request)[record.num_blocks :]
        data = self._data(request, record.num_tokens, new_ids, record.num_blocks, scheduled)
        record.num_tokens += len(data.new_tokens)
        record.num_blocks += len(new_ids)
        return data

    def _data(
        self,
        request: LlmRequest,
        first_token: int,
        new_ids: list[int],
        first_block: int,
        scheduled: int,
    ) -> RequestData:
        return RequestData(
            request_id=request.request_id,
            new_tokens=request.tokens.view[first_token:].tolist(),
            new_block_ids=new_ids,
            computed_position=request.num_computed_tokens,
            num_scheduled_tokens=scheduled,
            block_keys=list(request.block_keys()),
            new_block_ids_by_group=(new_ids,),
            cache_salt=request.cache_salt,
            priorities=self._kv.get_priorities(request, first_block) if new_ids else [],
        )
