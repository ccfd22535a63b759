"""The driver of one rank's worker, and the leader's orders for single requests to all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvconnect.connector.data import KvCachePools
from kvconnect.connector.ranks.communicator import (
    CancelLoad,
    Communicator,
    Instructions,
    Report,
    RequestOrder,
    ResetRequest,
    agreed,
)
from kvconnect.connector.runtime.answers import checked_failures, checked_finished, checked_progress
from kvconnect.connector.runtime.request_errors import RequestErrors
from kvconnect.connector.stream import CpuStream, ForwardStream
from kvconnect.connector.worker import KvCacheConnectorWorker
from kvconnect.errors import RankDivergence, UsageError
from kvconnect.request import LlmRequest
from kvconnect.trace import count


class RankDriver:
    """Calls a worker in the order that its contract promises; holds no state of any request.

    One step is `accept`, `start`, for each layer `wait_for_layer_load` and `save_kv_layer`,
    `end_forward`, `end`; an idle step is `accept`, `start`, `end`. If there is only one rank,
    `report_failures` is called after `end_forward`. All methods run on the engine's thread. The
    leader has a driver of its own worker.

    An error of the worker in a step is raised after it was sent to the other ranks. An error for
    one request is in the rank's next report.

    Args:
        worker: the worker, which receives its pools here. The caller shuts it down if that raises.
        pools: the pools of this rank.
        communicator: the communicator of all ranks.
        wakeup: the worker may call it, from any thread, when a transfer ended.

    Attributes:
        number: the number of the step that has begun or is next; the first is 1.
        telling: a context manager around code that may raise in a step. It sends the error to the
            other ranks before the error propagates. They raise, too, where they wait for this rank.
    """

    def __init__(
        self,
        worker: KvCacheConnectorWorker,
        pools: KvCachePools,
        communicator: Communicator,
        *,
        wakeup: Callable[[], None],
    ) -> None:
        self._worker = worker
        self._communicator = communicator
        self._device = pools[0].tensor.device
        self._stream: ForwardStream = CpuStream()
        self._begun: Instructions | None = None
        self._has_told = False  # this step's worker metadata is reported
        self._request_errors: dict[int, str] = {}
        self.number = 1
        self.telling = _Telling(communicator)
        worker.register_kv_cache_layout(pools)
        self._after_forward = worker.register_forward_pass_callable()
        worker.set_wakeup(wakeup)

    @property
    def has_begun(self) -> bool:
        """Returns whether a step is between its exchanges."""
        return self._begun is not None

    def carry_out(self, order: RequestOrder) -> None:
        """Carries out an order for one request, between two forward passes.

        The blocks of a request that was reset may be reused afterwards, also if this raises.

        Raises:
            Exception: the worker's error, which ends that request alone.
        """
        match order:
            case CancelLoad(request_id, ranks):
                if self._communicator.rank in ranks:
                    self._worker.cancel(request_id)
            case ResetRequest(request_id, num_committed):
                try:
                    self._worker.request_reset(request_id, num_committed)
                except Exception:
                    if self._device.type == "cuda":
                        torch.cuda.synchronize(self._device)  # ends all reads of the blocks
                    raise

    def accept(self, step: Instructions) -> None:
        """Begins a step with the leader's instructions, and carries out their orders.

        The leader has carried out its own orders when it gave them.

        Raises:
            RankDivergence: the leader is in another step.
        """
        if step.step != self.number:
            error = RankDivergence(
                f"rank {self._communicator.rank} is in step {self.number}, "
                f"the leader in step {step.step}"
            )
            self._communicator.fail(error)
            raise error
        self._begun = step
        if self._communicator.rank == 0:
            return
        for order in step.orders:
            try:
                self.carry_out(order)
            except Exception as error:  # noqa: BLE001  of a user's code; it ends the request
                count("connector.request_error")
                text = f"{type(error).__name__}: {error}"
                self._request_errors.setdefault(order.request_id, text)

    def start(self) -> None:
        """Binds the step's metadata, and starts its loads unless the step is idle."""
        step = self._step()
        if self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)
        with self.telling:
            if not step.is_idle or step.metadata is not None:
                self._worker.bind_connector_meta(step.metadata)
            if not step.is_idle:
                self._worker.start_load_kv(self._stream)

    def wait_for_layer_load(self, layer_idx: int) -> None:
        """Makes the loaded part of the layer readable for work that is enqueued next."""
        try:  # not `telling`: this is called for each layer
            self._worker.wait_for_layer_load(layer_idx, self._stream)
        except BaseException as error:
            self._communicator.fail(error)
            raise

    def save_kv_layer(self, layer_idx: int) -> None:
        """Makes the worker save the layer, whose work has been enqueued."""
        try:
            self._worker.save_kv_layer(layer_idx, self._stream)
        except BaseException as error:
            self._communicator.fail(error)
            raise

    def end_forward(self) -> None:
        """Ends a forward pass, before its tokens are sampled."""
        with self.telling:
            if self._after_forward is not None:
                self._after_forward()
            self._worker.wait_for_save(self._stream)
            self._worker.clear_connector_meta()

    def report_failures(self, *, has_loads: bool) -> list[Report]:
        """Returns the report of failed transfers, if there is only one rank; the step ends later.

        Without loads that may have progressed, and with nothing to report, it returns no report.

        Raises:
            ConnectorContractError: as `end`.
        """
        step, report = self._step(), None
        with self.telling:
            if has_loads:
                report = self._report(step)
            else:
                failures = checked_failures(self._worker, self._worker.get_failed())
                meta = self._worker.build_worker_meta()
                if failures or meta is not None:
                    report = Report(step.step, failures=tuple(failures), worker_meta=meta)
        self._has_told = True
        return [] if report is None else agreed(self._communicator, report)

    def end(self, ended: Sequence[int] = ()) -> list[Report]:
        """Ends the step, and returns every rank's report.

        Args:
            ended: requests whose save began in the step, if there is only one rank.

        Raises:
            ConnectorContractError: an answer of the worker has a wrong form; names the class.
                Another rank raised.
            RankDivergence: a rank is in another step.
        """
        with self.telling:
            step = self._step()
            finished = self._worker.get_finished([*step.saving, *ended], list(step.loading))
            report = self._report(step, *checked_finished(self._worker, finished))
            self._worker.clear_connector_meta()
        reports = agreed(self._communicator, report)
        self._begun, self._has_told = None, False
        self.number += 1
        return reports

    # ------------------------------------------------------------------ inside

    def _step(self) -> Instructions:
        if self._begun is None:
            raise UsageError("no step has begun")
        return self._begun

    def _report(
        self, step: Instructions, saved: Sequence[int] = (), loaded: Sequence[int] = ()
    ) -> Report:
        failures = checked_failures(self._worker, self._worker.get_failed())
        errors, self._request_errors = self._request_errors, {}
        return Report(
            step.step,
            tuple(saved),
            tuple(loaded),
            failures=tuple(failures),
            progress=checked_progress(self._worker, self._worker.get_load_progress()),
            heads=checked_progress(
                self._worker, self._worker.get_load_heads(), method="get_load_heads"
            ),
            load_times=tuple(
                (one, tuple(times)) for one, times in self._worker.get_load_times().items()
            ),
            worker_meta=None if self._has_told else self._worker.build_worker_meta(),
            request_errors=tuple(errors.items()),
        )


class _Telling:
    """Sends an error in a step to the other ranks before the error propagates."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Sends `error` to the other ranks, also an error that ends this process."""
        if error is not None:
            self._communicator.fail(error)


class RankOrders:
    """Carries orders out on the leader's rank at once; the other ranks get them with a step.

    Args:
        driver: the driver of the leader's worker.
        errors: records the errors of that worker.
        num_ranks: the number of ranks.
    """

    def __init__(self, driver: RankDriver, errors: RequestErrors, *, num_ranks: int) -> None:
        self._driver = driver
        self._errors = errors
        self._has_others = num_ranks > 1
        self._orders: list[RequestOrder] = []

    def cancel(self, request: LlmRequest, ranks: frozenset[int]) -> None:
        """Orders `ranks` to cancel the load of `request`."""
        self._give(request, CancelLoad(request.request_id, ranks))

    def reset(self, request: LlmRequest) -> None:
        """Orders all ranks to finish reading the blocks of `request`, which are freed next."""
        self._give(request, ResetRequest(request.request_id, request.num_computed_tokens))

    def take(self) -> tuple[RequestOrder, ...]:
        """Returns the orders since the last call, for the other ranks."""
        taken, self._orders = tuple(self._orders), []
        return taken

    def _give(self, request: LlmRequest, order: RequestOrder) -> None:
        with self._errors.kept(request):
            self._driver.carry_out(order)
        if self._has_others:
            self._orders.append(order)
