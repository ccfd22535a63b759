"""The runtime between an engine and a connector: one per rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvconnect.cache.resource_manager import BaseKVCacheManager
from kvconnect.connector.communicator import Communicator, LoadOrder, SingleProcess
from kvconnect.connector.data import Direction, LlmArgs
from kvconnect.connector.runtime.ledger import BlockFate, StepOutcome, TransferLedger
from kvconnect.connector.runtime.load_admission import LoadAdmission
from kvconnect.connector.runtime.loading import build_pair, connector_classes
from kvconnect.connector.runtime.pools import check_attachable, checked_pools
from kvconnect.connector.runtime.reporting import RequestRecord, StepReporter
from kvconnect.connector.runtime.request_errors import RequestErrors
from kvconnect.connector.runtime.save_admission import SaveAdmission
from kvconnect.connector.runtime.step_end import StepEnd
from kvconnect.connector.runtime.steps import RankSteps
from kvconnect.connector.scheduler import KvCacheConnectorScheduler
from kvconnect.connector.stream import CpuStream, ForwardStream
from kvconnect.errors import DuplicateRequest, UsageError
from kvconnect.request import ExternalMatch, LlmRequest, ScheduledBatch

__all__ = ["KvCacheConnectorManager", "StepOutcome"]


class KvCacheConnectorManager:
    """Calls a connector in the order its contract promises, and trusts nothing it answers.

    One step of the engine is `begin_step`, for each layer `wait_for_layer_load` and
    `save_kv_layer`, `end_forward`, `agree`, `end_step`; an idle step is `end_step` alone. All
    methods run on the engine's thread. Every step makes exactly two exchanges with the other ranks,
    whatever happens in it.

    What the connector raises for one request, or answers wrongly for it, is kept for `take_errors`
    of the leader and ends that request, on whichever rank it is raised; the connector is not asked
    to load or to place anything of that request any more. What it raises for a step is raised, on
    all ranks.

    A load that did not succeed leaves its request with fewer valid tokens, and where its writes may
    still come, with fresh blocks: those are told with `blocks_replaced`, and the request is in
    `new_requests` (once more, if it was before), since all about its blocks is new. With windows or
    several pools the request goes back to the queue instead: what windows would need to compute
    from an earlier position was never there.

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
        self._kv = kv
        self._communicator = communicator or SingleProcess()
        leads = self._communicator.rank == 0
        scheduler_class, worker_class = connector_classes(llm_args)
        self._scheduler, self._worker = build_pair(
            llm_args, scheduler_class if leads else None, worker_class
        )
        self._closed = False
        try:
            self._attach(llm_args, wakeup)
        except BaseException:
            self._shut_down_pair()
            raise
        tokens_per_block = llm_args.kv_cache_config.tokens_per_block
        self._records: dict[int, RequestRecord] = {}
        self._errors = RequestErrors(rank=self._communicator.rank)
        self._reporter = StepReporter(kv, tokens_per_block, len(llm_args.layouts))
        divisible = [layout.window for layout in llm_args.layouts] == [None]
        self._ledger = TransferLedger(
            kv,
            self._worker,
            self._records,
            self._errors,
            llm_args.kv_connector_config,
            rank=self._communicator.rank,
            num_ranks=self._communicator.size,
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
        )
        self._saves = SaveAdmission(
            self._ledger,
            self._reporter,
            errors=self._errors,
            num_ranks=self._communicator.size,
        )
        self._tokens_per_block = tokens_per_block
        self._steps = RankSteps(self._communicator)
        self._end = StepEnd(
            self._worker,
            self._scheduler,
            self._records,
            communicator=self._communicator,
            steps=self._steps,
            ledger=self._ledger,
            saves=self._saves,
            errors=self._errors,
            load_failed=self._load_failed,
        )
        self._stream: ForwardStream = CpuStream()
        kv.set_external_matcher(self)

    def _attach(self, llm_args: LlmArgs, wakeup: Callable[[], None]) -> None:
        pools = checked_pools(self._kv, llm_args.layouts)
        self._device = pools[0].tensor.device
        self._worker.register_kv_cache_layout(pools)
        self._after_forward = self._worker.register_forward_pass_callable()
        self._worker.set_wakeup(wakeup)
        if self._scheduler is not None:
            self._scheduler.wait_for_initialization()

    # ------------------------------------------------------------------ requests

    def on_new_request(self, request: LlmRequest) -> None:
        """`request` enters the queue.

        Raises:
            DuplicateRequest: a request of this id is live, or blocks of one are still held.
        """
        request_id = request.request_id
        if request_id in self._records or self._ledger.quarantine.knows(request_id):
            raise DuplicateRequest(f"request {request_id}: the connector has a request of this id")
        self._records[request_id] = RequestRecord(request)
        if self._scheduler is not None:
            with self._errors.kept(request):
                self._scheduler.on_new_request(request)

    def take_errors(self) -> dict[int, Exception]:
        """What the connector raised for single requests since the last call, by request id.

        The leader's engine ends these requests on all ranks, `request_finished` included, before
        the next step begins; some may have ended already. What another rank raised comes with the
        report of its step, as a `ConnectorContractError` that names the rank; other ranks have none
        to take.
        """
        return self._errors.take()

    def match_external(self, request: LlmRequest, num_device_tokens: int) -> ExternalMatch:
        """What is to be loaded beyond the device match; see `LoadAdmission.match`."""
        scheduler = self._leader("match_external")
        return self._loads.match(scheduler, self._record(request), num_device_tokens)

    def blocks_allocated(
        self, request: LlmRequest, block_ids: list[int], by_group: Sequence[list[int]] = ()
    ) -> None:
        """`request` was admitted and holds `block_ids`."""
        self._loads.admitted(self._record(request))
        if self._scheduler is not None and request not in self._errors:
            with self._errors.kept(request):
                self._scheduler.update_state_after_alloc(request, list(map(int, block_ids)))

    def request_finished(self, request: LlmRequest, *, aborted: bool = False) -> bool:
        """Generation ended; the request's blocks are still there.

        Which of several ranks keep them, and until when, is in `SaveAdmission`.

        Returns:
            True: keep the blocks until `end_step` lists the request as saved. Blocks that a
            cancelled load may still write are held apart in any case.
        """
        request.is_finished, request.is_finished_normal = True, not aborted
        record = self._records.get(request.request_id)
        if record is None:
            return False
        scheduler = self._scheduler
        if aborted and scheduler is not None:
            with self._errors.kept(request):
                scheduler.request_aborted(request)
        self._ledger.cancel_load(record)
        record.match = None  # if it ends before its load starts
        if record.holds_blocks and self._saves.ended(scheduler, request):
            return True
        del self._records[request.request_id]
        return False

    def request_reset(self, request: LlmRequest) -> None:
        """`request` is about to lose its blocks and goes back to the queue."""
        record = self._records.get(request.request_id)
        if record is None or not record.holds_blocks:
            return
        self._ledger.cancel_load(record)
        with self._errors.kept(request):
            self._worker.request_reset(request.request_id, request.num_computed_tokens)
        if request in self._errors and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # nothing may read the blocks any more
        if self._scheduler is not None:
            with self._errors.kept(request):
                self._scheduler.request_reset(request)
        record.evicted()

    def on_rewind(self, request: LlmRequest) -> None:
        """The last tokens of `request` were rejected; its blocks are rewound already."""
        record = self._record(request)
        block_ids = self._reporter.block_ids(request)
        record.num_tokens = min(record.num_tokens, request.num_tokens)
        record.num_blocks = [min(reported, len(block_ids)) for reported in record.num_blocks]
        if self._scheduler is not None:
            with self._errors.kept(request):
                self._scheduler.on_rewind(request, block_ids)

    def get_kv_transfer_params(self, request: LlmRequest) -> dict[str, Any] | None:
        """What travels to the client with the result of `request`."""
        if self._scheduler is not None:
            with self._errors.kept(request):
                return self._scheduler.get_kv_transfer_params(request)
        return None

    def take_events(self) -> Sequence[object]:
        """The connector's events since the last call."""
        return self._scheduler.take_events() if self._scheduler else ()

    # ------------------------------------------------------------------ one step

    def begin_step(self, batch: ScheduledBatch) -> None:
        """After admission and chunking: tell the connector what the step computes, start its loads.

        Call it for every step with a batch, also if every request of it is loading.

        Raises:
            RankDivergence: ranks are in different steps.
        """
        loads: list[LoadOrder] = []
        metadata: object = None
        if self._scheduler is not None:
            loading = [one for one in batch.loading_requests if self._record(one).match is not None]
            for requests in (loading, batch.context_requests):
                loads += [load for one in requests if (load := self._order(one)) is not None]
            output = self._reporter.report(batch, self._records, loading)
            with self._steps.telling:
                metadata = self._scheduler.build_connector_meta(output)
        self._exchange(metadata, tuple(loads))
        if self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)
        with self._steps.telling:
            self._worker.bind_connector_meta(self._steps.begun.metadata)
            self._worker.start_load_kv(self._stream)

    def wait_for_layer_load(self, layer_idx: int) -> None:
        """Before the layer's work is enqueued: what is loaded of it may be read afterwards."""
        with self._steps.telling:
            self._worker.wait_for_layer_load(layer_idx, self._stream)

    def save_kv_layer(self, layer_idx: int) -> None:
        """After the layer's work was enqueued."""
        with self._steps.telling:
            self._worker.save_kv_layer(layer_idx, self._stream)

    def end_forward(self) -> None:
        """At the end of a forward pass, before anything is sampled."""
        with self._steps.telling:
            if self._after_forward is not None:
                self._after_forward()
            self._worker.wait_for_save(self._stream)
            self._worker.clear_connector_meta()

    def agree(self) -> dict[int, int]:
        """Returns the loads that failed: request id to leading valid tokens, as in `StepOutcome`.

        Called after the forward pass, before anything of it is sampled; not in an idle step.
        Several ranks exchange all that ended in the step here. One rank alone asks its worker what
        ended in `end_step`, by when it knows which requests the step has ended.

        Raises:
            ConnectorContractError: a worker broke its contract; names the class. Another rank
                raised.
            RankDivergence: ranks are in different steps.
        """
        return self._end.agree().failed

    def end_step(self) -> StepOutcome:
        """Returns what ended in the step; called once a step, idle steps too.

        Raises:
            ConnectorContractError, RankDivergence: as `agree`.
        """
        if not (self._steps.has_begun or self._end.has_agreed):
            self._begin_idle_step()
        return self._end.end()

    def wait_seconds(self) -> float | None:
        """How long to sleep after an idle step; ``None``: until something arrives."""
        if self._saves:
            return 0.0
        deadline = self._ledger.next_deadline()
        if deadline is None:
            return None
        left = max(0.0, deadline - time.monotonic())
        # What ends on another rank wakes that one alone.
        told = self._worker.wakes and self._communicator.size == 1
        return left if told else min(self._end.poll_s, left)

    def has_pending(self) -> bool:
        """Whether a transfer is in flight."""
        return bool(self._saves or self._ledger.loads or self._ledger.saves)

    def expects_news(self) -> bool:
        """Whether an idle `end_step` may bring anything, if only blocks of a transfer given up."""
        return self.has_pending() or bool(self._ledger.quarantine)

    def shutdown(self) -> None:
        """Drain what is staged up to ``save_timeout_s`` and end the connector; idempotent."""
        if not self._closed:
            self._shut_down_pair()
            self._ledger.quarantine.release_all()

    # ------------------------------------------------------------------ inside

    def _leader(self, method: str) -> KvCacheConnectorScheduler:
        if self._scheduler is None:
            raise UsageError(f"{method}: rank {self._communicator.rank} is not the leader")
        return self._scheduler

    def _record(self, request: LlmRequest) -> RequestRecord:
        record = self._records.get(request.request_id)
        if record is None:
            raise UsageError(f"request {request.request_id}: on_new_request was not called")
        return record

    def _order(self, request: LlmRequest) -> LoadOrder | None:
        """The load that was matched for this admission, to be started now."""
        record = self._record(request)
        match, record.match = record.match, None
        if match is None:
            return None
        # With windows a match may be cut to before the position that was asked for.
        start = min(match.position, request.num_computed_tokens)
        start -= start % self._tokens_per_block
        return LoadOrder(request.request_id, start, match.end, match.is_async)

    def _begin_idle_step(self) -> None:
        metadata: object = None
        if self._scheduler is not None:
            with self._steps.telling:
                metadata = self._scheduler.build_idle_meta()
        self._exchange(metadata, ())
        if self._steps.begun.metadata is not None:
            with self._steps.telling:
                self._worker.bind_connector_meta(self._steps.begun.metadata)

    def _exchange(self, metadata: object, loads: tuple[LoadOrder, ...]) -> None:
        dropped = self._loads.take_dropped()
        begun = self._steps.begin(metadata, loads, saving=self._saves.saving, dropped=dropped)
        for request_id in begun.dropped:
            self._ledger.quarantine.note_ended(Direction.LOAD, request_id)
        for load in begun.loads:
            self._ledger.start_load(load)
        self._saves.begin(begun.saving)

    def _load_failed(self, record: RequestRecord, num_valid: int, fate: BlockFate) -> None:
        request = record.request
        record.failed_loads += 1
        if self._scheduler is not None:
            with self._errors.kept(request):
                self._scheduler.load_failed(request, num_valid)
        if fate is BlockFate.EXCHANGED:
            record.forget_reports()
            if self._scheduler is not None:
                with self._errors.kept(request):
                    self._scheduler.blocks_replaced(request, self._reporter.block_ids(request))
        elif fate is BlockFate.LOST:
            self.request_reset(request)

    def _shut_down_pair(self) -> None:
        self._closed = True
        try:
            self._worker.shutdown()
        finally:
            if self._scheduler is not None:
                self._scheduler.shutdown()
