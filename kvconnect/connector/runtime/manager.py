"""The runtime between an engine and a connector: one per rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvconnect.cache.resource_manager import BaseKVCacheManager
from kvconnect.connector.communicator import (
    Communicator,
    Instructions,
    LoadOrder,
    SingleProcess,
    agreed,
    obeyed,
)
from kvconnect.connector.data import Direction, KvCachePool, LlmArgs
from kvconnect.connector.runtime.answers import checked_keep, checked_match
from kvconnect.connector.runtime.ledger import BlockFate, StepOutcome, TransferLedger
from kvconnect.connector.runtime.loading import build_pair, connector_classes
from kvconnect.connector.runtime.reporting import RequestRecord, StepReporter
from kvconnect.connector.scheduler import KvCacheConnectorScheduler
from kvconnect.errors import ConfigurationError, UsageError
from kvconnect.layout import KvCacheLayout
from kvconnect.request import ExternalMatch, LlmRequest, ScheduledBatch

__all__ = ["KvCacheConnectorManager", "StepOutcome"]

# With windows a load that failed is of no use at all. The second try finds what is wrong with the
# store's blocks gone; more of them would let a slow store hold a request up for ever.
_MOST_FAILED_LOADS = 2
_FIRST_POLL_S = 0.001
_LAST_POLL_S = 0.010


class KvCacheConnectorManager:
    """Calls a connector in the order its contract promises, and trusts nothing it answers.

    One step of the engine is `begin_step`, for each layer `wait_for_layer_load` and
    `save_kv_layer`, `end_forward`, `end_step`; an idle step is `end_step` alone. All methods run on
    the engine's thread. Every step makes exactly two exchanges with the other ranks, whatever
    happens in it.

    A load that did not succeed leaves its request with fewer valid tokens, and where its writes may
    still come, with fresh blocks: those are told with `update_state_after_alloc`, and the request
    is in `new_requests` (once more, if it was before), since all about its blocks is new. With
    windows or several pools the request goes back to the queue instead: what windows would need to
    compute from an earlier position was never there.

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
        _check(llm_args, kv)
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
        self._reporter = StepReporter(kv, tokens_per_block, len(llm_args.layouts))
        self._divisible = [layout.window for layout in llm_args.layouts] == [None]
        self._ledger = TransferLedger(
            kv,
            self._worker,
            self._records,
            llm_args.kv_connector_config,
            rank=self._communicator.rank,
            num_ranks=self._communicator.size,
            tokens_per_block=tokens_per_block,
            divisible=self._divisible,
        )
        self._tokens_per_block = tokens_per_block
        self._step = 0
        self._instructions: Instructions | None = None  # of the step that has begun
        self._stream: torch.cuda.Stream | None = None
        self._saving: list[int] = []  # ended, to be passed to get_finished in the next step
        self._cancelled: list[int] = []
        self._poll_s = _FIRST_POLL_S
        kv.set_external_matcher(self)

    def _attach(self, llm_args: LlmArgs, wakeup: Callable[[], None]) -> None:
        pools = [self._pool(group, layout) for group, layout in enumerate(llm_args.layouts)]
        self._device = pools[0].tensor.device
        self._worker.register_kv_cache_layout(pools)
        self._after_forward = self._worker.register_forward_pass_callable()
        self._worker.set_wakeup(wakeup)

    def _pool(self, group: int, layout: KvCacheLayout) -> KvCachePool:
        tensor = self._kv.pool_tensor(group) if group else self._kv.pool_tensor()
        if tensor.shape != layout.flat_shape(len(tensor)) or tensor.dtype != layout.dtype:
            raise ConfigurationError(
                f"pool group {group}: {type(self._kv).__name__} has {tensor.dtype} "
                f"{tuple(tensor.shape)}, the layout says {layout.dtype} "
                f"{layout.flat_shape(len(tensor))}"
            )
        return KvCachePool(layout, tensor)

    # ------------------------------------------------------------------ requests

    def on_new_request(self, request: LlmRequest) -> None:
        """`request` enters the queue."""
        self._records[request.request_id] = RequestRecord(request)
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    def match_external(self, request: LlmRequest, num_device_tokens: int) -> ExternalMatch:
        """What the connector supplies beyond the device match; asked once per admission.

        While too many blocks are held back for transfers that timed out, or the request's own last
        load is still held, the connector is not asked; nor once loads of this request have failed
        `_MOST_FAILED_LOADS` times, where each of them sends it back to the queue.
        """
        position = num_device_tokens - num_device_tokens % self._tokens_per_block
        nothing = ExternalMatch(position)
        record = self._record(request)
        record.match = None
        quarantine = self._ledger.quarantine
        given_up = not self._divisible and record.failed_loads >= _MOST_FAILED_LOADS
        if given_up or quarantine.full or quarantine.holds(Direction.LOAD, request.request_id):
            return nothing
        scheduler = self._leader("match_external")
        answer = scheduler.get_num_new_matched_tokens(request, position)
        num_tokens, is_async = checked_match(scheduler, answer)
        # The last token is always computed: its logits are needed.
        num_tokens = min(num_tokens, request.num_tokens - 1 - position)
        match = ExternalMatch(position, num_tokens, is_async)
        if match.end <= num_device_tokens:
            return nothing
        record.match = match
        return match

    def blocks_allocated(
        self, request: LlmRequest, block_ids: list[int], by_group: Sequence[list[int]] = ()
    ) -> None:
        """`request` was admitted and holds `block_ids`."""
        self._record(request).admitted()
        if self._scheduler is not None:
            self._scheduler.update_state_after_alloc(request, [int(block) for block in block_ids])

    def request_finished(self, request: LlmRequest, *, aborted: bool = False) -> bool:
        """Generation ended; the request's blocks are still there.

        Returns:
            True: keep the blocks until `end_step` lists the request as saved. Blocks that a
            cancelled load may still write are held apart in any case.
        """
        record = self._records.get(request.request_id)
        if record is None:
            return False
        scheduler = self._scheduler
        if aborted and scheduler is not None:
            scheduler.request_aborted(request)
        self._cancel(record)
        keep = False
        if record.holds_blocks and scheduler is not None:
            block_ids = self._reporter.block_ids(request)
            keep = checked_keep(scheduler, scheduler.request_finished(request, block_ids))
        elif record.holds_blocks:
            keep = True  # until the leader's next instructions say what it answered
        if keep:
            self._saving.append(request.request_id)
        else:
            del self._records[request.request_id]
        return keep

    def request_reset(self, request: LlmRequest) -> None:
        """`request` is about to lose its blocks and goes back to the queue."""
        record = self._records.get(request.request_id)
        if record is None or not record.holds_blocks:
            return
        self._cancel(record)
        self._worker.request_reset(request.request_id, request.num_computed_tokens)
        if self._scheduler is not None:
            self._scheduler.request_reset(request)
        record.evicted()

    def on_rewind(self, request: LlmRequest) -> None:
        """The last tokens of `request` were rejected; its blocks are rewound already."""
        record = self._record(request)
        block_ids = self._reporter.block_ids(request)
        record.num_tokens = min(record.num_tokens, request.num_tokens)
        record.num_blocks = [min(reported, len(block_ids)) for reported in record.num_blocks]
        if self._scheduler is not None:
            self._scheduler.on_rewind(request, block_ids)

    def get_kv_transfer_params(self, request: LlmRequest) -> dict[str, Any] | None:
        """What travels to the client with the result of `request`."""
        return self._scheduler.get_kv_transfer_params(request) if self._scheduler else None

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
        self._step += 1
        loads: list[LoadOrder] = []
        metadata: object = None
        if self._scheduler is not None:
            loading = [one for one in batch.loading_requests if self._record(one).match is not None]
            for requests in (loading, batch.context_requests):
                loads += [load for one in requests if (load := self._order(one)) is not None]
            output = self._reporter.report(batch, self._records, loading)
            metadata = self._scheduler.build_connector_meta(output)
        self._exchange(metadata, tuple(loads))
        if self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)
        self._worker.bind_connector_meta(self._begun.metadata)
        self._worker.start_load_kv(self._stream)

    def wait_for_layer_load(self, layer_idx: int) -> None:
        """Before the layer's work is enqueued: what is loaded of it may be read afterwards."""
        self._worker.wait_for_layer_load(layer_idx, self._stream)

    def save_kv_layer(self, layer_idx: int) -> None:
        """After the layer's work was enqueued."""
        self._worker.save_kv_layer(layer_idx, self._stream)

    def end_forward(self) -> None:
        """At the end of a forward pass, before anything is sampled."""
        if self._after_forward is not None:
            self._after_forward()
        self._worker.wait_for_save(self._stream)
        self._worker.clear_connector_meta()

    def end_step(self) -> StepOutcome:
        """Ask every rank what ended; call it once a step, idle steps too, before sampling.

        Raises:
            ConnectorContractError: a worker broke its contract; names the class.
            RankDivergence: ranks are in different steps.
        """
        if self._instructions is None:
            self._begin_idle_step()
        begun, self._instructions = self._begun, None
        loading = tuple(load.request_id for load in begun.loads if load.is_async)
        report = self._ledger.collect(begun.step, begun.saving, loading)
        self._worker.clear_connector_meta()
        reports = agreed(self._communicator, report)
        if self._scheduler is not None:
            metas = [one.worker_meta for one in reports if one.worker_meta is not None]
            self._scheduler.update_from_workers(metas)
        outcome = self._ledger.settle(reports, self._load_failed)
        if self._scheduler is None:
            self._release_refused(begun, outcome)
        for request_id in outcome.saved:
            self._records.pop(request_id, None)
        self._back_off(progress=bool(report.saved or report.loaded or report.failures))
        return outcome

    def wait_seconds(self) -> float | None:
        """How long to sleep with nothing runnable; ``None``: until something arrives."""
        if self._saving or self._cancelled:
            return 0.0
        deadline = self._ledger.next_deadline()
        if deadline is None:
            return None
        left = max(0.0, deadline - time.monotonic())
        return left if self._worker.wakes else min(self._poll_s, left)

    def has_pending(self) -> bool:
        """Whether a transfer is in flight."""
        return bool(self._saving or self._ledger.loads or self._ledger.saves)

    def expects_news(self) -> bool:
        """Whether an idle `end_step` may bring anything, if only blocks of a transfer given up."""
        return self.has_pending() or bool(self._cancelled or self._ledger.quarantine)

    def shutdown(self) -> None:
        """Drain what is staged up to ``save_timeout_s`` and end the connector; idempotent."""
        if not self._closed:
            self._shut_down_pair()
            self._ledger.quarantine.release_all()

    # ------------------------------------------------------------------ inside

    @property
    def _begun(self) -> Instructions:
        if self._instructions is None:
            raise UsageError("no step has begun")
        return self._instructions

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
        self._step += 1
        self._exchange(None if self._scheduler is None else self._scheduler.build_idle_meta(), ())
        if self._begun.metadata is not None:
            self._worker.bind_connector_meta(self._begun.metadata)

    def _exchange(self, metadata: object, loads: tuple[LoadOrder, ...]) -> None:
        mine = Instructions(
            self._step, metadata, loads, tuple(self._saving), tuple(self._cancelled)
        )
        self._instructions = obeyed(self._communicator, mine)
        for load in self._instructions.loads:
            self._ledger.start_load(load)
        for request_id in self._instructions.saving:
            self._ledger.start_save(request_id)
        if self._scheduler is None:
            for request_id in self._instructions.cancelled:
                self._worker.cancel(request_id)
            return
        self._saving.clear()
        self._cancelled.clear()

    def _cancel(self, record: RequestRecord) -> None:
        record.match = None
        if self._ledger.cancel_load(record) and self._communicator.size > 1:
            self._cancelled.append(record.request.request_id)

    def _load_failed(self, record: RequestRecord, num_valid: int, fate: BlockFate) -> None:
        request = record.request
        record.failed_loads += 1
        if self._scheduler is not None:
            self._scheduler.load_failed(request, num_valid)
        if fate is BlockFate.EXCHANGED:
            self.blocks_allocated(request, self._reporter.block_ids(request))
        elif fate is BlockFate.LOST:
            self.request_reset(request)

    def _release_refused(self, begun: Instructions, outcome: StepOutcome) -> None:
        """On a follower: the leader answered that these need not be kept."""
        outcome.saved += [one for one in self._saving if one not in begun.saving]
        self._saving.clear()

    def _back_off(self, *, progress: bool) -> None:
        self._poll_s = _FIRST_POLL_S if progress else min(2 * self._poll_s, _LAST_POLL_S)

    def _shut_down_pair(self) -> None:
        self._closed = True
        try:
            self._worker.shutdown()
        finally:
            if self._scheduler is not None:
                self._scheduler.shutdown()


def _check(llm_args: LlmArgs, kv: BaseKVCacheManager) -> None:
    if not llm_args.kv_cache_config.enable_block_reuse:
        raise ConfigurationError(
            "enable_block_reuse=False: a connector needs block reuse; switch it on, or attach none"
        )
    if not kv.supports_connector:
        raise ConfigurationError(
            f"{type(kv).__name__} does not support connectors (supports_connector is False)"
        )
