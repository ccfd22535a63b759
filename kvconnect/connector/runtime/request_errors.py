"""What a connector raises for one request: it ends that request, no other."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvconnect.connector.communicator import RequestError
from kvconnect.errors import ConnectorContractError
from kvconnect.request import LlmRequest
from kvconnect.trace import count

__all__ = ["RequestErrors"]

_log = logging.getLogger(__name__)


class RequestErrors:
    """The first error of each request, until the leader's engine takes it and ends the request.

    Of several ranks the leader alone decides what becomes of a request. What another rank's worker
    raises for one reaches the leader with that rank's next report; until then the ranks go on with
    the request, and what they make of it is thrown away.

    Args:
        rank: this one; 0 is the leader.
    """

    def __init__(self, *, rank: int) -> None:
        self._leads = rank == 0
        self._errors: dict[int, Exception] = {}

    def __contains__(self, request: LlmRequest) -> bool:
        return request.request_id in self._errors

    @contextmanager
    def kept(self, request: LlmRequest) -> Iterator[None]:
        """Keep what the block raises for `request`, and go on behind the block."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  of a user's code; it ends the request
            self._keep(request.request_id, error)

    def take(self) -> dict[int, Exception]:
        """Errors by request id since the last call, of requests that have ended, too.

        None on a rank that is not the leader.
        """
        if not self._leads:
            return {}
        taken, self._errors = self._errors, {}
        return taken

    def take_report(self) -> tuple[RequestError, ...]:
        """What the leader is to hear of this rank since the last call; of the leader nothing."""
        if self._leads or not self._errors:
            return ()
        told, self._errors = self._errors, {}
        return tuple(
            RequestError(request_id, f"{type(error).__name__}: {error}")
            for request_id, error in told.items()
        )

    def hear(self, rank: int, errors: Sequence[RequestError]) -> None:
        """On the leader: `rank` reports `errors`. Elsewhere nothing."""
        if not self._leads:
            return
        for one in errors:
            text = f"rank {rank}: {one.text}"
            # Its request may have ended meanwhile, and then no caller gets the error.
            _log.warning("request %d: %s", one.request_id, text)
            self._keep(one.request_id, ConnectorContractError(text))

    def _keep(self, request_id: int, error: Exception) -> None:
        count("connector.request_error")
        self._errors.setdefault(request_id, error)
