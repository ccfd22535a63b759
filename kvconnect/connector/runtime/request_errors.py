"""The errors that a connector raises for one request; each ends only that request."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvconnect.connector.ranks.communicator import Report
from kvconnect.errors import ConnectorContractError
from kvconnect.request import LlmRequest
from kvconnect.trace import count

_log = logging.getLogger(__name__)


class RequestErrors:
    """The first error of each request, until the engine takes it and ends the request.

    An error of another rank's worker comes with that rank's next report. Until then the ranks
    continue with the request, and its results are discarded.
    """

    def __init__(self) -> None:
        self._errors: dict[int, Exception] = {}

    def __contains__(self, request: LlmRequest) -> bool:
        return request.request_id in self._errors

    @contextmanager
    def kept(self, request: LlmRequest) -> Iterator[None]:
        """Records an error of the ``with`` block for `request`, and continues after the block."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  of a user's code; it ends the request
            self._keep(request.request_id, error)

    def take(self) -> dict[int, Exception]:
        """Returns errors by request id since the last call, of requests that have ended, too."""
        taken, self._errors = self._errors, {}
        return taken

    def enter(self, reports: Sequence[Report]) -> None:
        """Keeps the errors in `reports`, by rank, as `ConnectorContractError` with the rank."""
        for rank, report in enumerate(reports):
            for request_id, error in report.request_errors:
                text = f"rank {rank}: {error}"
                # Its request may have ended meanwhile, and then no caller gets the error.
                _log.warning("request %d: %s", request_id, text)
                self._keep(request_id, ConnectorContractError(text))

    def _keep(self, request_id: int, error: Exception) -> None:
        count("connector.request_error")
        self._errors.setdefault(request_id, error)
