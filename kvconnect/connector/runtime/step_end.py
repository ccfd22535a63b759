"""The end of a step: what workers report of it, and which requests that concerns."""

from __future__ import annotations

from kvconnect.connector.communicator import Communicator, Report, agreed
from kvconnect.connector.runtime.ledger import LoadFailed, StepOutcome, TransferLedger
from kvconnect.connector.runtime.reporting import RequestRecord
from kvconnect.connector.runtime.request_errors import RequestErrors
from kvconnect.connector.runtime.save_admission import SaveAdmission
from kvconnect.connector.runtime.steps import RankSteps
from kvconnect.connector.scheduler import KvCacheConnectorScheduler
from kvconnect.connector.worker import KvCacheConnectorWorker

__all__ = ["StepEnd"]

_FIRST_POLL_S = 0.001
_LAST_POLL_S = 0.010


class StepEnd:
    """Asks the worker what failed and what ended, and settles that with the other ranks.

    What failed has to be known before anything of the step is sampled. Several ranks exchange what
    ended with it, and so call `get_finished` there. One rank alone calls it at the very end of the
    step, as TensorRT-LLM does: by then it knows which requests the step has ended.

    Attributes:
        poll_s: how long an idle engine waits for a worker that does not wake it.
    """

    def __init__(
        self,
        worker: KvCacheConnectorWorker,
        scheduler: KvCacheConnectorScheduler | None,
        records: dict[int, RequestRecord],
        *,
        communicator: Communicator,
        steps: RankSteps,
        ledger: TransferLedger,
        saves: SaveAdmission,
        errors: RequestErrors,
        load_failed: LoadFailed,
    ) -> None:
        self._worker = worker
        self._scheduler = scheduler
        self._records = records
        self._communicator = communicator
        self._steps = steps
        self._ledger = ledger
        self._saves = saves
        self._errors = errors
        self._load_failed = load_failed
        self._agreed: StepOutcome | None = None
        self.poll_s = _FIRST_POLL_S

    @property
    def has_agreed(self) -> bool:
        """True after `agree` was called in this step."""
        return self._agreed is not None

    def agree(self) -> StepOutcome:
        """Returns what of the step's outcome is to be known before anything is sampled."""
        self._agreed = outcome = StepOutcome()
        if self._communicator.size > 1:
            self._end(outcome)
        else:
            report = self._ledger.collect_failed(self._steps.begun.step)
            self._settle(agreed(self._communicator, report), outcome)
        return outcome

    def end(self) -> StepOutcome:
        """Returns the step's outcome; the step is over."""
        outcome, self._agreed = self._agreed, None
        if outcome is None:
            outcome = StepOutcome()
            self._end(outcome)
        elif self._communicator.size == 1:
            ended = self._saves.saving
            self._saves.begin(ended)
            self._end(outcome, ended, is_first=False)
        return outcome

    def _end(
        self, outcome: StepOutcome, ended: tuple[int, ...] = (), *, is_first: bool = True
    ) -> None:
        """Adds to `outcome` what ended on all ranks; `ended` began to save since the step began."""
        begun = self._steps.begun
        saving = (*begun.saving, *ended)
        loading = tuple(load.request_id for load in begun.loads if load.is_async)
        with self._steps.telling:
            report = self._ledger.collect(begun.step, saving, loading, is_first=is_first)
            self._worker.clear_connector_meta()
        reports = self._steps.end(report)
        self._settle(reports, outcome, is_first=is_first)
        has_news = outcome.failed or any(one.saved or one.loaded or one.failures for one in reports)
        self.poll_s = _FIRST_POLL_S if has_news else min(2 * self.poll_s, _LAST_POLL_S)

    def _settle(
        self, reports: list[Report], outcome: StepOutcome, *, is_first: bool = True
    ) -> None:
        with self._steps.telling:
            for rank, one in enumerate(reports):
                self._errors.hear(rank, one.request_errors)
            if self._scheduler is not None and is_first:
                metas = [one.worker_meta for one in reports if one.worker_meta is not None]
                self._scheduler.update_from_workers(metas)
            self._ledger.settle(reports, self._load_failed, outcome)
        outcome.saved += self._saves.refused
        for request_id in outcome.saved:
            self._records.pop(request_id, None)
