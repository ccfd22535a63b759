"""The runtime that connects an engine with a connector, on the leader."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from kvconnect.cache.resource_manager import BaseKVCacheManager
from kvconnect.connector.data import Direction, LlmArgs
from kvconnect.connector.ranks.communicator import Communicator, Instructions, Report, SingleProcess
from kvconnect.connector.runtime.admission import LoadAdmission, SaveAdmission
from kvconnect.connector.runtime.ledger import TransferLedger
from kvconnect.connector.runtime.loading import build_pair, connector_classes
from kvconnect.connector.runtime.pools import check_attachable, checked_pools
from kvconnect.connector.runtime.rank import RankDriver, RankOrders
from kvconnect.connector.runtime.reporting import RequestRecord, StepReporter
from kvconnect.connector.runtime.request_errors import RequestErrors
from kvconnect.connector.runtime.transfers import BlockFate, StepOutcome
from kvconnect.errors import DuplicateRequest, UsageError
from kvconnect.request import ExternalMatch, LlmRequest, ScheduledBatch

__all__ = ["KvCacheConnectorManager", "StepOutcome"]

_FIRST_POLL_S = 0.001
_LAST_POLL_S = 0.010


class KvCacheConnectorManager:
    """Calls a connector in the order its contract promises, and checks every answer.

    The manager has all state of requests and transfers. Every worker, also the leader's, is driven
    by a `RankDriver`.

    One step of the engine is `begin_step`, for each layer `wait_for_layer_load` and
    `save_kv_layer`, `end_forward`, `agree`, `end_step`; an idle step is `begin_idle_step`,
    `end_step`. All methods run on the engine's thread. Every step makes exactly two exchanges with
    the other ranks, whatever happens in it.

    An error that the connector raises for one request, or a wrong answer for one, is kept for
    `take_errors` and ends that request, on whichever rank it occurs. The connector gets no more
    calls to load or place blocks of that request. An error for a step is raised on all ranks.

    A load that did not succeed leaves its request with fewer valid tokens. If writes of the load
    may still come, the request gets fresh blocks: `blocks_replaced` reports them, and the request
    is in `new_requests` (once more, if it was before), since all about its blocks is new. With
    windows or several pools the request goes back to the queue instead: the blocks that windows
    need to compute from an earlier position were never there.

    Raises:
        ConfigurationError: block reuse is off, the cache manager serves no connector, a class
            cannot be found or built, a store cannot be reached. Nothing is left running.
    """

    def __init__(
        self,
        llm_args: LlmArgs,
        kv: BaseKVCacheManager,
        *,
        wakeup: Callable[[], None],
        communicator: Communicator | None = None,
    ) -> None:
        check_attachable(llm_args, kv)
        self._communicator = communicator or SingleProcess()
        self._scheduler, self._worker = build_pair(llm_args, *connector_classes(llm_args))
        self._closed = False
        try:
            self._rank = RankDriver(
                self._worker,
                checked_pools(kv, llm_args.layouts),
                self._communicator,
                wakeup=wakeup,
            )
            self._scheduler.wait_for_initialization()
        except BaseException:
            self._shut_down_pair()
            raise
        tokens_per_block = llm_args.kv_cache_config.tokens_per_block
        num_ranks = self._communicator.size
        self._records: dict[int, RequestRecord] = {}
        self._errors = RequestErrors()
        self._orders = RankOrders(self._rank, self._errors, num_ranks=num_ranks)
        self._reporter = StepReporter(kv, tokens_per_block, llm_args.layouts)
        divisible = [layout.window for layout in llm_args.layouts] == [None]
        self._ledger = TransferLedger(
            kv,
            self._orders,
            self._records,
            llm_args.kv_connector_config,
            worker_name=type(self._worker).__name__,
            num_ranks=num_ranks,
            tokens_per_block=tokens_per_block,
            divisible=divisible,
        )
        self._loads = LoadAdmission(
            kv,
            self._ledger,
            llm_args.kv_connector_config,
            errors=self._errors,
            tokens_per_block=tokens_per_block,
            divisible=divisible,
            whole_blocks=any(layout.kind == "state" for layout in llm_args.layouts),
        )
        self._saves = SaveAdmission(self._scheduler, self._ledger, self._reporter, self._errors)
        self._outcome: StepOutcome | None = None
        self._poll_s = _FIRST_POLL_S
        kv.set_external_matcher(weakref.proxy(self))

    # ------------------------------------------------------------------ requests

    def on_new_request(self, request: LlmRequest) -> None:
        """Adds `request`, which enters the queue.

        Raises:
            DuplicateRequest: a request of this id is live, or blocks of one are still held.
        """
        request_id = request.request_id
        if request_id in self._records or self._ledger.quarantine.knows(request_id):
            raise DuplicateRequest(f"request {request_id}: the connector has a request of this id")
        self._records[request_id] = RequestRecord(request)
        with self._errors.kept(request):
            self._scheduler.on_new_request(request)

    def take_errors(self) -> dict[int, Exception]:
        """Returns the connector's errors for single requests since the last call, by request id.

        The engine ends these requests, with `request_finished`, before the next step begins; some
        may have ended already. An error of another rank comes with the report of its step, as a
        `ConnectorContractError` that names the rank.
        """
        return self._errors.take()

    def match_external(self, request: LlmRequest, num_device_tokens: int) -> ExternalMatch:
        """Returns the tokens to load beyond the device match; see `LoadAdmission.match`."""
        return self._loads.match(self._scheduler, self._record(request), num_device_tokens)

    def set_worth(self, is_worth: Callable[[LlmRequest, ExternalMatch], bool]) -> None:
        """Sets `is_worth`, which returns whether to start the load of a match."""
        self._loads.is_worth = is_worth

    def blocks_allocated(self, request: LlmRequest, block_ids: list[int]) -> None:
        """Records that `request` was admitted and holds `block_ids`."""
        self._loads.admitted(self._record(request))
        if request not in self._errors:
            with self._errors.kept(request):
                self._scheduler.update_state_after_alloc(request, list(map(int, block_ids)))

    def request_finished(self, request: LlmRequest, *, aborted: bool = False) -> bool:
        """Ends `request`, which still holds its blocks.

        Returns:
            True if the caller must keep the blocks until `end_step` lists the request as saved.
            Blocks that a cancelled load may still write are in quarantine in any case.
        """
        request.is_finished, request.is_finished_normal = True, not aborted
        record = self._records.get(request.request_id)
        if record is None:
            return False
        if aborted:
            with self._errors.kept(request):
                self._scheduler.request_aborted(request)
        self._ledger.cancel_load(record)
        record.match = None  # if it ends before its load starts
        if record.holds_blocks and self._saves.ended(request):
            return True
        del self._records[request.request_id]
        return False

    def request_reset(self, request: LlmRequest) -> None:
        """Prepares `request` for the loss of its blocks and its return to the queue."""
        record = self._records.get(request.request_id)
        if record is None or not record.holds_blocks:
            return
        self._ledger.cancel_load(record)
        self._orders.reset(request)
        with self._errors.kept(request):
            self._scheduler.request_reset(request)
        record.evicted()

    def on_rewind(self, request: LlmRequest) -> None:
        """Reports that the last tokens of `request` were rejected; its blocks are rewound."""
        record = self._record(request)
        block_ids = self._reporter.block_ids(request)
        record.num_tokens = min(record.num_tokens, request.num_tokens)
        record.num_blocks = [min(reported, len(block_ids)) for reported in record.num_blocks]
        with self._errors.kept(request):
            self._scheduler.on_rewind(request, block_ids)

    def get_kv_transfer_params(self, request: LlmRequest) -> dict[str, Any] | None:
        """Returns the parameters that the client receives with the result of `request`."""
        with self._errors.kept(request):
            if (params := self._scheduler.get_kv_transfer_params(request)) is not None:
                return params
        return None

    def take_events(self) -> Sequence[object]:
        """Returns the connector's events since the last call."""
        return self._scheduler.take_events()

    # ------------------------------------------------------------------ one step

    def begin_step(self, batch: ScheduledBatch, work: object = None) -> None:
        """Passes the step to the connector, and starts its loads, on every rank.

        Called after admission and chunking, for every step with a batch, even if all its requests
        are loading.

        Args:
            batch: the requests that the step computes.
            work: the engine's data for the other ranks, sent with the instructions.

        Raises:
            RankDivergence: ranks are in different steps.
        """
        loading = [one for one in batch.loading_requests if self._record(one).match is not None]
        in_background = [
            request.request_id
            for requests in (loading, batch.context_requests)
            for request in requests
            if self._loads.start(self._record(request))
        ]
        for request in batch.context_requests:
            if not request.load_end:
                self._ledger.overtake(self._record(request))
        output = self._reporter.report(batch, self._records, loading)
        with self._rank.telling:
            metadata = self._scheduler.build_connector_meta(output)
        self._begin(metadata, work, loading=tuple(in_background))

    def begin_idle_step(self, work: object = None) -> None:
        """Begins a step without a batch, in which the workers report ended transfers.

        Raises:
            RankDivergence: ranks are in different steps.
        """
        with self._rank.telling:
            metadata = self._scheduler.build_idle_meta()
        self._begin(metadata, work, is_idle=True)

    def wait_for_layer_load(self, layer_idx: int) -> None:
        """Makes the loaded part of a layer readable; called before the layer's work is enqueued."""
        self._rank.wait_for_layer_load(layer_idx)

    def save_kv_layer(self, layer_idx: int) -> None:
        """Saves a layer; called after the layer's work was enqueued."""
        self._rank.save_kv_layer(layer_idx)

    def end_forward(self) -> None:
        """Ends a forward pass; called before any of its tokens is sampled."""
        self._rank.end_forward()

    def agree(self) -> dict[int, int]:
        """Returns the failed loads: leading valid tokens by request id, as in `StepOutcome`.

        Called after the forward pass, before any of its tokens is sampled; not in an idle step.
        With several ranks it exchanges all transfers that ended in the step. With one rank
        `end_step` does that, as in TensorRT-LLM, because then the requests that ended in the step
        are known.

        Raises:
            ConnectorContractError: a worker broke its contract; names the class. Another rank
                raised.
            RankDivergence: ranks are in different steps.
        """
        self._outcome = outcome = StepOutcome()
        is_alone = self._communicator.size == 1
        has_loads = bool(self._ledger.loads)
        reports = self._rank.report_failures(has_loads=has_loads) if is_alone else self._rank.end()
        if reports:
            self._settle(reports, outcome, is_first=True)
        else:
            with self._rank.telling:
                self._scheduler.update_from_workers(())
        return outcome.failed

    def end_step(self) -> StepOutcome:
        """Returns the transfers that ended in the step; called once a step, idle steps too.

        A step without `begin_step` counts as an idle one.

        Raises:
            ConnectorContractError, RankDivergence: as `agree`.
        """
        outcome, self._outcome = self._outcome, None
        is_first = outcome is None
        if outcome is None:
            outcome = StepOutcome()
            if not self._rank.has_begun:
                self.begin_idle_step()
        if self._rank.has_begun:
            ended = self._saves.start() if self._communicator.size == 1 else ()
            self._settle(self._rank.end(ended), outcome, is_first=is_first)
        return outcome

    def wait_seconds(self) -> float | None:
        """Returns the seconds to sleep after an idle step; ``None``: until a wakeup."""
        if self._saves:
            return 0.0
        deadline = self._ledger.next_deadline()
        if deadline is None:
            return None
        left = max(0.0, deadline - time.monotonic())
        # A transfer that ends on another rank wakes that rank alone.
        told = self._worker.wakes and self._communicator.size == 1
        return left if told else min(self._poll_s, left)

    def has_pending(self) -> bool:
        """Returns True if a transfer is in flight."""
        return bool(self._saves or self._ledger.loads or self._ledger.saves)

    def expects_news(self) -> bool:
        """Returns True if an idle step may end a transfer, or free blocks in quarantine."""
        return self.has_pending() or bool(self._ledger.quarantine)

    def shutdown(self) -> None:
        """Writes staged blocks up to ``save_timeout_s`` and ends the connector; idempotent."""
        if not self._closed:
            self._shut_down_pair()
            self._ledger.quarantine.release_all()

    # ------------------------------------------------------------------ inside

    def _record(self, request: LlmRequest) -> RequestRecord:
        record = self._records.get(request.request_id)
        if record is None:
            raise UsageError(f"request {request.request_id}: on_new_request was not called")
        return record

    def _begin(
        self,
        metadata: object,
        work: object,
        *,
        loading: tuple[int, ...] = (),
        is_idle: bool = False,
    ) -> None:
        for request_id in self._loads.take_dropped():
            # A connector that did not notice that its offer was dropped may return the id.
            self._ledger.quarantine.note_ended(Direction.LOAD, request_id)
        step = Instructions(
            self._rank.number,
            metadata,
            is_idle=is_idle,
            saving=self._saves.start(),
            loading=loading,
            orders=self._orders.take(),
            work=work,
        )
        self._rank.accept(self._communicator.broadcast(step))
        self._rank.start()

    def _load_failed(self, record: RequestRecord, num_valid: int, fate: BlockFate) -> None:
        request = record.request
        record.failed_loads += 1
        with self._errors.kept(request):
            self._scheduler.load_failed(request, num_valid)
        if fate is BlockFate.EXCHANGED:
            record.forget_reports()
            with self._errors.kept(request):
                self._scheduler.blocks_replaced(request, self._reporter.block_ids(request))
        elif fate is BlockFate.LOST:
            self.request_reset(request)

    def _settle(self, reports: list[Report], outcome: StepOutcome, *, is_first: bool) -> None:
        """Adds `reports` to `outcome`; `is_first` is true for the first reports of the step."""
        # Deadlines are checked only after every worker has reported ended transfers.
        goes_on = self._rank.has_begun
        now = -math.inf if goes_on else time.monotonic()
        with self._rank.telling:
            self._ledger.check(reports)
            self._errors.enter(reports)
            if is_first:
                self._scheduler.update_from_workers(
                    [one.worker_meta for one in reports if one.worker_meta is not None]
                )
            self._ledger.settle(reports, self._load_failed, outcome, now)
        for request_id in outcome.saved:
            self._records.pop(request_id, None)
        if not goes_on:
            has_news = bool(outcome.failed) or any(
                one.saved or one.loaded or one.failures for one in reports
            )
            self._poll_s = _FIRST_POLL_S if has_news else min(2 * self._poll_s, _LAST_POLL_S)

    def _shut_down_pair(self) -> None:
        self._closed = True
        try:
            self._worker.shutdown()
        finally:
            self._scheduler.shutdown()
