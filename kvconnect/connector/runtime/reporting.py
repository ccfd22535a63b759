"""The report of a step to the connector's scheduler, with each token and block once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import overload

from kvconnect.cache.resource_manager import BaseKVCacheManager
from kvconnect.connector.data import RequestData, SchedulerOutput
from kvconnect.connector.runtime.pools import pool_groups
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout
from kvconnect.request import ExternalMatch, LlmRequest, ScheduledBatch


@dataclass(slots=True, eq=False)
class RequestRecord:
    """The runtime's record of a live request.

    Attributes:
        request: the engine's request.
        holds_blocks: true from its admission until its blocks are freed.
        offer: the connector's answer for the next admission.
        waits_until: the monotonic time at which a deferred offer is dropped.
        match: the accepted part of the offer, until its load starts.
        failed_loads: the number of failed loads over all admissions.
        reported: true if it was in `new_requests` since its blocks were allocated.
        num_tokens: the number of reported tokens.
        num_blocks: the number of reported block ids of each pool group.
    """

    request: LlmRequest
    holds_blocks: bool = False
    offer: ExternalMatch | None = None
    waits_until: float | None = None
    match: ExternalMatch | None = None
    failed_loads: int = 0
    reported: bool = False
    num_tokens: int = 0
    num_blocks: list[int] = field(default_factory=list)

    def admitted(self) -> None:
        """Records new blocks, none of them reported, and drops the connector's answer."""
        self.holds_blocks = True
        self.offer = self.waits_until = None
        self.forget_reports()

    def forget_reports(self) -> None:
        """Resets the counts of reported tokens and blocks."""
        self.reported = False
        self.num_tokens = 0
        self.num_blocks = []

    def evicted(self) -> None:
        """Records that the request has lost its blocks."""
        self.admitted()
        self.holds_blocks = False
        self.match = None


class _Keys(Sequence[BlockKey]):
    """The present keys of a request's full blocks, computed when they are first read.

    A prompt of 131,072 tokens has 8,192 of them, and in most steps no connector reads one.
    """

    __slots__ = ("_keys", "_length", "_request")

    def __init__(self, request: LlmRequest) -> None:
        self._request: LlmRequest | None = request
        self._length = request.num_tokens // request.key_chain.tokens_per_block
        self._keys: list[BlockKey] = []

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, at: int) -> BlockKey: ...

    @overload
    def __getitem__(self, at: slice) -> list[BlockKey]: ...

    def __getitem__(self, at: int | slice) -> BlockKey | list[BlockKey]:
        return self._listed()[at]

    def __eq__(self, other: object) -> bool:
        return self._listed() == (other._listed() if isinstance(other, _Keys) else other)

    def __hash__(self) -> int:
        return hash(tuple(self._listed()))

    def __repr__(self) -> str:
        return repr(self._listed())

    def __reduce__(self) -> tuple[type[list[BlockKey]], tuple[list[BlockKey]]]:
        return list, (self._listed(),)

    def _listed(self) -> list[BlockKey]:
        if self._request is not None:
            self._keys, self._request = list(self._request.block_keys(0, self._length)), None
        return self._keys


class StepReporter:
    """Builds the `SchedulerOutput` of a step from its batch and the earlier reports.

    Pools of sliding windows get their blocks chunk by chunk, so their reported blocks may lag
    behind those of group 0. While a request computes beside its load, only their blocks up to the
    end of the step are reported. A group of states is reported where a step ends with a block, or
    else begins with one, up to there: each block is -1 but for the snapshot that the request holds.

    Args:
        kv: knows the blocks.
        tokens_per_block: of all groups.
        layouts: of the connector's groups; `pool_groups` says which pools these are.
    """

    def __init__(
        self, kv: BaseKVCacheManager, tokens_per_block: int, layouts: Sequence[KvCacheLayout]
    ) -> None:
        self._kv = kv
        self._tokens_per_block = tokens_per_block
        self._pools = pool_groups(layouts)
        self._windows = {
            pool for pool, one in zip(self._pools, layouts, strict=True) if one.window is not None
        }
        self._states = next(
            (pool for pool, one in zip(self._pools, layouts, strict=True) if one.kind == "state"),
            None,
        )

    def report(
        self, batch: ScheduledBatch, records: dict[int, RequestRecord], loading: list[LlmRequest]
    ) -> SchedulerOutput:
        """Returns the new tokens and blocks of `batch`, and marks them in `records` as reported.

        Args:
            batch: what the step computes.
            records: the records of its requests.
            loading: the records of requests whose background load starts in this step.
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
                record.num_blocks = [len(ids) for ids in data.new_block_ids_by_group]
                output.new_requests.append(data)
        return output

    def block_ids(self, request: LlmRequest) -> list[int]:
        """Returns ids of the blocks that `request` holds in group 0, as plain ints."""
        indices = self._kv.get_batch_cache_indices([request])[request.request_id]
        return [int(block) for block in indices]

    def _reserved(self, request: LlmRequest, pool: int) -> list[int]:
        """Returns ids in `pool` up to the last block held there; -1 where no block is held."""
        ids = self._ids(request, pool)
        if request.load_end and request.num_scheduled_tokens and pool in self._windows:
            end = request.num_computed_tokens + request.num_scheduled_tokens
            del ids[-(-end // self._tokens_per_block) :]
        while ids and ids[-1] < 0:
            ids.pop()
        return ids

    def _ids(self, request: LlmRequest, pool: int) -> list[int]:
        if pool == 0:
            return self.block_ids(request)
        indices = self._kv.get_group_cache_indices([request], pool)[request.request_id]
        return [int(block) for block in indices]

    def _new_ids(self, request: LlmRequest, pool: int, reported: int, end: int) -> list[int]:
        """Returns the ids in `pool` behind `reported` ones, for a step up to token `end`."""
        # Most decode steps add a token and no block: then the block manager gets no call.
        if -(-end // self._tokens_per_block) <= reported:
            return []
        if pool != self._states:
            return self._reserved(request, pool)[reported:]
        if end % self._tokens_per_block:
            end = request.num_computed_tokens  # where a load ended, perhaps
        number, rest = divmod(end, self._tokens_per_block)
        return [] if rest else self._ids(request, pool)[reported:number]

    def _whole(self, request: LlmRequest, scheduled: int) -> RequestData:
        by_pool = {pool: self._reserved(request, pool) for pool in dict.fromkeys(self._pools)}
        ids = tuple(by_pool[pool] for pool in self._pools)
        return self._data(request, 0, ids, 0, scheduled)

    def _increment(self, request: LlmRequest, record: RequestRecord) -> RequestData:
        scheduled = request.num_scheduled_tokens
        end = request.num_computed_tokens + scheduled
        # Groups of one pool were reported alike.
        by_pool = {
            pool: self._new_ids(request, pool, reported, end)
            for pool, reported in dict(zip(self._pools, record.num_blocks, strict=True)).items()
        }
        new_ids = tuple(by_pool[pool] for pool in self._pools)
        data = self._data(request, record.num_tokens, new_ids, record.num_blocks[0], scheduled)
        record.num_tokens += len(data.new_tokens)
        for group, ids in enumerate(new_ids):
            record.num_blocks[group] += len(ids)
        return data

    def _data(
        self,
        request: LlmRequest,
        first_token: int,
        new_ids: Sequence[list[int]],
        first_block: int,
        scheduled: int,
    ) -> RequestData:
        flat = new_ids[0]
        priorities = self._kv.get_priorities(request, first_block)[: len(flat)] if flat else []
        return RequestData(
            request_id=request.request_id,
            new_tokens=request.tokens.view[first_token:].tolist(),
            new_block_ids=flat,
            computed_position=request.num_computed_tokens,
            num_scheduled_tokens=scheduled,
            block_keys=_Keys(request),
            new_block_ids_by_group=tuple(new_ids),
            cache_salt=request.cache_salt,
            priorities=priorities,
        )
