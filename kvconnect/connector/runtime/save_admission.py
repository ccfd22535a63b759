"""The choice of requests that keep their blocks for a save when they end."""

from __future__ import annotations

from kvconnect.connector.runtime.answers import checked_keep
from kvconnect.connector.runtime.ledger import TransferLedger
from kvconnect.connector.runtime.reporting import StepReporter
from kvconnect.connector.runtime.request_errors import RequestErrors
from kvconnect.connector.scheduler import KvCacheConnectorScheduler
from kvconnect.request import LlmRequest
from kvconnect.trace import warn_once

__all__ = ["SaveAdmission"]


class SaveAdmission:
    """Asks the connector at the end of each request, once, and notes whose saves are to start."""

    def __init__(
        self,
        scheduler: KvCacheConnectorScheduler,
        ledger: TransferLedger,
        reporter: StepReporter,
        errors: RequestErrors,
    ) -> None:
        self._scheduler = scheduler
        self._ledger = ledger
        self._reporter = reporter
        self._errors = errors
        self._saving: list[int] = []

    def __bool__(self) -> bool:
        """Returns True if a request keeps its blocks for a save that has not started."""
        return bool(self._saving)

    def ended(self, request: LlmRequest) -> bool:
        """Returns True if `request`, which ended and holds blocks, is to keep them for a save.

        An error of the connector, or a wrong answer, is kept and ends the request.
        """
        keep = False
        with self._errors.kept(request):
            keep = self._keeps(request)
        if keep:
            self._saving.append(request.request_id)
        return keep

    def start(self) -> tuple[int, ...]:
        """Starts the saves of requests that ended since the last call, and returns their ids."""
        saving, self._saving = tuple(self._saving), []
        for request_id in saving:
            self._ledger.start_save(request_id)
        return saving

    def _keeps(self, request: LlmRequest) -> bool:
        scheduler = self._scheduler
        if self._ledger.may_save(request, self._saving):
            block_ids = self._reporter.block_ids(request)
            return checked_keep(scheduler, scheduler.request_finished(request, block_ids))
        warn_once(
            "connector.save.refused",
            f"request {request.request_id}: {type(scheduler).__name__} is not asked to save "
            "it: saves that were not returned in time hold too much of the pool",
        )
        if request.is_finished_normal:  # otherwise this was called at the abort
            scheduler.request_aborted(request)
        return False
