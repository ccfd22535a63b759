"""The transfers in flight over all ranks, and how each of them ends."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from kvconnect.cache.resource_manager import BaseKVCacheManager, PinnedBlocks
from kvconnect.config import KvCacheConnectorConfig
from kvconnect.connector.data import Direction, TransferFailure
from kvconnect.connector.ranks.communicator import Report
from kvconnect.connector.runtime.quarantine import Quarantine
from kvconnect.connector.runtime.rank import RankOrders
from kvconnect.connector.runtime.reporting import RequestRecord
from kvconnect.connector.runtime.transfers import (
    BlockFate,
    LoadFailed,
    StepOutcome,
    Transfer,
    Transfers,
    TransferState,
)
from kvconnect.errors import ConnectorContractError, OutOfBlocks
from kvconnect.request import LlmRequest
from kvconnect.trace import warn_once

# The least seconds that a request waits for blocks in quarantine, even if deadlines are shorter: a
# request that stops waiting fails.
_GRACE_S = 10.0


class TransferLedger:
    """The transfers in flight. A transfer succeeds if it succeeds on all ranks; each ends once.

    A transfer that was cancelled or is late may still touch its blocks, so they go to the
    quarantine. A request whose load failed keeps the blocks up to its valid position. It gets fresh
    blocks for the tokens after it, or is queued again if there are none. A load that is not
    `divisible` (with windows or several pools) is valid only as a whole, so its request is always
    queued again.

    A load that overlaps with computing ends once every worker has ended it, even if it is not
    complete. Its loaded tokens are valid; the tokens before them are computed.
    """

    def __init__(
        self,
        kv: BaseKVCacheManager,
        orders: RankOrders,
        records: dict[int, RequestRecord],
        config: KvCacheConnectorConfig,
        *,
        worker_name: str,
        num_ranks: int,
        tokens_per_block: int,
        divisible: bool = True,
    ) -> None:
        self.loads = Transfers(Direction.LOAD)
        self.saves = Transfers(Direction.SAVE)
        pool_blocks = kv.get_max_resource_count()
        self._ranks = ranks = frozenset(range(num_ranks))
        self.quarantine = Quarantine(kv, ranks, int(pool_blocks * config.max_quarantined_fraction))
        self._max_saving = int(pool_blocks * config.max_loading_fraction)
        self._kv = kv
        self._orders = orders
        self._records = records
        self._config = config
        self._worker_name = worker_name
        self._tokens_per_block = tokens_per_block
        self._divisible = divisible

    def start_load(
        self, request_id: int, start: int, end: int, *, is_async: bool, overlaps: bool = False
    ) -> None:
        """Adds a load that makes the tokens ``start..end`` of a request valid and starts now."""
        deadline = time.monotonic() + self._config.load_timeout_s if is_async else None
        self.loads.start(request_id, deadline, start, end, overlaps=overlaps)

    def loading_records(self) -> list[RequestRecord]:
        """Returns the requests with a background load."""
        return [
            self._records[load.request_id]
            for load in self.loads
            if load.is_async and load.request_id in self._records
        ]

    def may_save(self, request: LlmRequest, others: Iterable[int] = ()) -> bool:
        """Returns True if the blocks of `request`, which ended, may be kept for a save.

        `others` are ended requests whose saves start with the next step.

        Returns False only if saves are overdue and the blocks of all saves would exceed
        ``max_loading_fraction`` of the pool. So a worker that never ends its saves cannot hold the
        whole pool.
        """
        late = self.quarantine.num_save_blocks
        if not late:
            return True
        saving = [
            record.request
            for request_id in (*(save.request_id for save in self.saves), *others)
            if (record := self._records.get(request_id)) is not None
        ]
        return late + sum(map(self._num_held, [*saving, request])) <= self._max_saving

    def start_save(self, request_id: int) -> None:
        """Starts the save of an ended request now."""
        self.saves.start(request_id, time.monotonic() + self._config.save_timeout_s)

    def cancel_load(self, record: RequestRecord) -> None:
        """Moves the blocks of `record` into quarantine: its load still writes to them."""
        request = record.request
        load = self.loads.get(request.request_id)
        if load is None:
            return
        self.loads.finish(load, TransferState.CANCELLED)
        self._hold(load, self._kv.pin(request), self._num_held(request))
        self._orders.cancel(request, self._ranks)

    def overtake(self, record: RequestRecord) -> None:
        """Cancels the load of `record` if it overlaps with computing and is no longer needed.

        The step computes all of the load's tokens; its metadata stops every worker from writing to
        them.
        """
        load = self.loads.get(record.request.request_id)
        if load is not None and load.progress is not None:
            self.cancel_load(record)

    def check(self, reports: Sequence[Report]) -> None:
        """Checks that the workers' answers in `reports`, by rank, keep the contract.

        Raises:
            ConnectorContractError: an answer breaks it; names the class.
        """
        for rank, report in enumerate(reports):
            self._check_returned(rank, self.saves, report.saved)
            self._check_returned(rank, self.loads, report.loaded)
            for failure in report.failures:
                self._check_failure(failure)
            for request_id, position in report.progress:
                self._check_progress(rank, request_id, position)
            for request_id, position in report.heads:
                self._check_head(request_id, position)

    def settle(
        self, reports: Sequence[Report], load_failed: LoadFailed, outcome: StepOutcome, now: float
    ) -> None:
        """Adds the results of `reports`, by rank, to `outcome`; fails transfers due by `now`."""
        if not (self.loads or self.saves or self.quarantine):
            return
        for rank, report in enumerate(reports):
            self._enter(rank, report)
        for load in self.loads:
            self._settle_load(load, now, outcome, load_failed)
        for save in self.saves:
            self._settle_save(save, now, outcome)

    def next_deadline(self) -> float | None:
        """Returns the next deadline of a transfer or grace period, on the monotonic clock, or None.

        Blocks in quarantine have a grace period as long as their transfer may take, at least 10 s.
        A request that still waits for them after it fails.
        """
        grace = self.quarantine.grace_until()
        if grace is not None and grace < time.monotonic():
            grace = None
        deadlines = (self.loads.next_deadline(), self.saves.next_deadline(), grace)
        return min((one for one in deadlines if one is not None), default=None)

    # ------------------------------------------------------------------ what is legal to report

    def _check_returned(self, rank: int, transfers: Transfers, returned: Sequence[int]) -> None:
        direction = transfers.direction
        for request_id in returned:
            transfer = transfers.get(request_id)
            if transfer is None or not transfer.is_async:
                if self.quarantine.expects(direction, request_id):
                    continue
                problem = "which was never passed in, or was returned before"
            elif rank in transfer.done_ranks or returned.count(request_id) > 1:
                problem = "twice"
            else:
                continue
            raise ConnectorContractError(
                f"{self._worker_name}.get_finished returned request {request_id} as "
                f"{'saved' if direction is Direction.SAVE else 'loaded'}, {problem}"
            )

    def _check_failure(self, failure: TransferFailure) -> None:
        direction, request_id = failure.direction, failure.request_id
        reported = (
            f"{self._worker_name}.get_failed reported a {direction.value} of request {request_id}"
        )
        transfer = self._transfers(direction).get(request_id)
        if transfer is None:
            if not self.quarantine.expects(direction, request_id):
                raise ConnectorContractError(f"{reported}, which has none")
        elif direction is Direction.LOAD and failure.num_valid_tokens > transfer.end:
            raise ConnectorContractError(
                f"{reported} with num_valid_tokens={failure.num_valid_tokens}; the load ends "
                f"at {transfer.end}"
            )

    def _check_progress(self, rank: int, request_id: int, position: int) -> None:
        reported = (
            f"{self._worker_name}.get_load_progress reported {position} for request {request_id}"
        )
        load = self.loads.get(request_id)
        if load is None or load.progress is None:
            if load is not None or not self.quarantine.expects(Direction.LOAD, request_id):
                raise ConnectorContractError(f"{reported}, which has no load beside its computing")
        elif not load.start <= position <= load.progress.get(rank, load.end):
            raise ConnectorContractError(
                f"{reported}; the load from {load.start} to {load.end} has reached "
                f"{load.progress.get(rank, load.end)}"
            )

    def _check_head(self, request_id: int, position: int) -> None:
        load = self.loads.get(request_id)
        if load is not None and load.progress is not None and position > load.end:
            raise ConnectorContractError(
                f"{self._worker_name}.get_load_heads reported {position} for request {request_id}; "
                f"the load ends at {load.end}"
            )

    # ------------------------------------------------------------------ what all ranks reported

    def _transfers(self, direction: Direction) -> Transfers:
        return self.loads if direction is Direction.LOAD else self.saves

    def _enter(self, rank: int, report: Report) -> None:
        for request_id in report.loaded:
            self._done(rank, Direction.LOAD, request_id)
        for request_id in report.saved:
            self._done(rank, Direction.SAVE, request_id)
        self._enter_progress(rank, report)
        self._enter_failures(rank, report.failures)

    def _enter_progress(self, rank: int, report: Report) -> None:
        heads = dict(report.heads)
        for request_id, position in report.progress:
            load = self.loads.get(request_id)
            if load is not None and load.progress is not None:
                load.progress[rank] = position
                load.heads[rank] = heads.get(request_id, 0)
                if (record := self._records.get(request_id)) is not None:
                    record.request.loaded_from = load.loaded_from(len(self._ranks))
                    record.request.load_head = load.head(len(self._ranks))
        for request_id, times in report.load_times:
            if rank == 0 and (record := self._records.get(request_id)) is not None:
                record.request.load_times += times

    def _enter_failures(self, rank: int, failures: tuple[TransferFailure, ...]) -> None:
        failed_loads = set()
        for failure in failures:
            if failure.direction is Direction.LOAD:
                failed_loads.add(failure.request_id)
            transfer = self._transfers(failure.direction).get(failure.request_id)
            if transfer is not None:
                transfer.fail(rank, failure)
            if failure.writes_ended:
                self._done(rank, failure.direction, failure.request_id)
        for load in self.loads:
            # A synchronous load ended with the forward pass, unless its worker reported a failure.
            if not load.is_async and load.request_id not in failed_loads:
                load.done_ranks.add(rank)

    def _done(self, rank: int, direction: Direction, request_id: int) -> None:
        transfer = self._transfers(direction).get(request_id)
        if transfer is not None:
            transfer.done_ranks.add(rank)
        elif self.quarantine.holds(direction, request_id):
            self.quarantine.returned(direction, request_id, rank)
        else:
            warn_once(
                "connector.late",
                f"{self._worker_name} returned request {request_id} after its "
                f"{direction.value} had ended; ignored",
            )

    def _settle_load(
        self, load: Transfer, now: float, outcome: StepOutcome, load_failed: LoadFailed
    ) -> None:
        if load.progress is not None and load.failed_ranks <= load.done_ranks:
            self._settle_overlapping(load, now, outcome, load_failed)
        elif load.failed:
            self._fail_load(load, outcome, load_failed)
        elif load.done_ranks >= self._ranks:
            self.loads.finish(load, TransferState.COMPLETED)
            if load.is_async:
                outcome.loaded[load.request_id] = load.end
        elif load.is_late(now):
            self._fail_load(load, outcome, load_failed)

    def _settle_overlapping(
        self, load: Transfer, now: float, outcome: StepOutcome, load_failed: LoadFailed
    ) -> None:
        if load.done_ranks < self._ranks:
            if load.is_late(now):
                self._fail_load(load, outcome, load_failed)
            return
        request_id = load.request_id
        loaded_from = load.loaded_from(len(self._ranks))
        self.loads.finish(load, TransferState.FAILED if load.failed else TransferState.COMPLETED)
        outcome.loaded[request_id] = load.end
        outcome.loaded_from[request_id] = loaded_from
        if load.failed:
            warn_once(
                "connector.load.failed",
                f"request {request_id}: load failed ({load.reason}); the tokens before "
                f"{loaded_from} are computed instead",
            )
            self.quarantine.note_ended(Direction.LOAD, request_id)
            if (record := self._records.get(request_id)) is not None:
                record.request.account.lose(load.loss, load.end)
                load_failed(record, load.start, BlockFate.KEPT)

    def _fail_load(self, load: Transfer, outcome: StepOutcome, load_failed: LoadFailed) -> None:
        request_id = load.request_id
        # A rank that has not reported may have no valid tokens.
        heard = load.done_ranks | load.failed_ranks >= self._ranks
        num_valid = load.num_valid if heard and self._divisible else load.start
        record = self._records.get(request_id)
        if load.progress is not None and record is not None:
            # No worker writes before the computed tokens.
            num_valid = max(load.start, record.request.num_computed_tokens)
        # The request's own failure is more precise than the deadline.
        state = TransferState.FAILED if load.failed else TransferState.TIMED_OUT
        self.loads.finish(load, state)
        warn_once(
            f"connector.load.{state.value}",
            f"request {request_id}: load {state.value} ({load.reason or 'deadline'}); "
            f"{load.end - num_valid} tokens are computed instead",
        )
        fate = BlockFate.KEPT if self._divisible else BlockFate.LOST
        if load.done_ranks >= self._ranks:
            self.quarantine.note_ended(Direction.LOAD, request_id)
        elif record is not None:
            num_valid -= num_valid % self._tokens_per_block
            fate = self._exchange_blocks(load, record, num_valid)
        outcome.failed[request_id] = num_valid
        if record is not None:
            record.request.account.lose(load.loss, load.end)
            if fate is BlockFate.LOST:
                outcome.requeue.add(request_id)
            load_failed(record, num_valid, fate)

    def _exchange_blocks(self, load: Transfer, record: RequestRecord, num_valid: int) -> BlockFate:
        request = record.request
        self._orders.cancel(request, self._ranks - load.done_ranks)
        num_held, first = self._num_held(request), num_valid // self._tokens_per_block
        if self._divisible:
            with suppress(OutOfBlocks):
                self._hold(load, self._kv.detach(request, first), num_held - first)
                return BlockFate.EXCHANGED
        self._hold(load, self._kv.pin(request), num_held)
        return BlockFate.LOST

    def _settle_save(self, save: Transfer, now: float, outcome: StepOutcome) -> None:
        done = save.done_ranks >= self._ranks
        if not (save.failed or done or save.is_late(now)):
            return
        if save.failed:
            self.saves.finish(save, TransferState.FAILED)
        else:
            self.saves.finish(save, TransferState.COMPLETED if done else TransferState.TIMED_OUT)
        if save.state is not TransferState.COMPLETED:
            warn_once(
                f"connector.save.{save.state.value}",
                f"request {save.request_id}: save {save.state.value} ({save.reason or 'deadline'})",
            )
        record = self._records.get(save.request_id)
        if done:
            if save.failed:
                self.quarantine.note_ended(Direction.SAVE, save.request_id)
        elif record is not None:
            # If the blocks were reused while they are still read, their new content would be stored
            # under the old content's keys.
            self._hold(save, self._kv.pin(record.request), self._num_held(record.request))
        outcome.saved.append(save.request_id)

    def _hold(self, transfer: Transfer, blocks: PinnedBlocks, num_blocks: int) -> None:
        is_load = transfer.direction is Direction.LOAD
        timeout_s = self._config.load_timeout_s if is_load else self._config.save_timeout_s
        until = time.monotonic() + max(timeout_s, _GRACE_S)
        self.quarantine.hold(transfer, blocks, num_blocks=num_blocks, grace_until=until)

    def _num_held(self, request: LlmRequest) -> int:
        ids = self._kv.get_batch_cache_indices([request])[request.request_id]
        return sum(block >= 0 for block in ids)
