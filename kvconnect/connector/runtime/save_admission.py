"""Which requests keep their blocks for a save when they end, and until when."""

from __future__ import annotations

from collections.abc import Sequence

from kvconnect.connector.runtime.answers import checked_keep
from kvconnect.connector.runtime.ledger import TransferLedger
from kvconnect.connector.runtime.reporting import StepReporter
from kvconnect.connector.runtime.request_errors import RequestErrors
from kvconnect.connector.scheduler import KvCacheConnectorScheduler
from kvconnect.request import LlmRequest
from kvconnect.trace import warn_once

__all__ = ["SaveAdmission"]


class SaveAdmission:
    """Asks the connector at the end of each request, once, and remembers it until the next step.

    Of several ranks each keeps the blocks of every request that ended until all know what the
    leader's connector answers: blocks are named by the leader's ids, so that all of them must take
    and free the same ones.

    Attributes:
        refused: requests whose blocks go with the step that has begun.
    """

    def __init__(
        self,
        ledger: TransferLedger,
        reporter: StepReporter,
        *,
        errors: RequestErrors,
        num_ranks: int,
    ) -> None:
        self._ledger = ledger
        self._reporter = reporter
        self._errors = errors
        self._num_ranks = num_ranks
        self._ended: dict[int, bool] = {}  # since the last exchange: whether to keep their blocks
        self.refused: Sequence[int] = ()

    def __bool__(self) -> bool:
        """Whether a request ended of which the other ranks do not know yet."""
        return bool(self._ended)

    @property
    def saving(self) -> tuple[int, ...]:
        """Requests that ended and whose saves did not start."""
        return tuple(request_id for request_id, keep in self._ended.items() if keep)

    def ended(self, scheduler: KvCacheConnectorScheduler | None, request: LlmRequest) -> bool:
        """Whether `request`, which ended and holds blocks, is to keep them for now.

        What the connector raises, or answers wrongly, is kept and ends the request.

        Args:
            scheduler: of the connector; ``None``: of another rank, which answers for all.
            request: is asked about once.
        """
        keep = scheduler is not None and self._keeps(scheduler, request)
        if not keep and self._num_ranks == 1:
            return False
        self._ended[request.request_id] = keep
        return True

    def begin(self, saving: Sequence[int]) -> None:
        """Starts the saves of `saving`, which all ranks know of now, of those that ended.

        Ranks know of them when a step begins; one rank alone knows when a request ends.
        """
        for request_id in saving:
            self._ledger.start_save(request_id)
        self.refused = [one for one in self._ended if one not in saving]
        self._ended.clear()

    def _keeps(self, scheduler: KvCacheConnectorScheduler, request: LlmRequest) -> bool:
        """Whether the connector keeps the blocks of `request` for a save."""
        with self._errors.kept(request):
            if self._ledger.may_save(request, self.saving):
                block_ids = self._reporter.block_ids(request)
                return checked_keep(scheduler, scheduler.request_finished(request, block_ids))
            warn_once(
                "connector.save.refused",
                f"request {request.request_id}: {type(scheduler).__name__} is not asked to save "
                "it: saves that were not returned in time hold too much of the pool",
            )
            if request.is_finished_normal:  # otherwise it was told
                scheduler.request_aborted(request)
        return False
