"""What a connector raises for one request: it ends that request, no other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvconnect.request import LlmRequest
from kvconnect.trace import count

__all__ = ["RequestErrors"]


class RequestErrors:
    """The first error of each request, until the engine takes it and ends the request by it.

    Args:
        alone: there is one rank. Of several one alone would know of an error that is kept here,
            and end what the others go on with: there it ends the step, on all of them.
    """

    def __init__(self, *, alone: bool) -> None:
        self._alone = alone
        self._errors: dict[int, Exception] = {}

    def __contains__(self, request: LlmRequest) -> bool:
        return request.request_id in self._errors

    @contextmanager
    def kept(self, request: LlmRequest) -> Iterator[None]:
        """Keep what the block raises for `request`, and go on behind the block.

        Raises:
            Exception: what the block raises, of several ranks.
        """
        try:
            yield
        except Exception as error:
            if not self._alone:
                raise
            count("connector.request_error")
            self._errors.setdefault(request.request_id, error)

    def take(self) -> dict[int, Exception]:
        """Errors by request id since the last call; of requests that have ended, too."""
        taken, self._errors = self._errors, {}
        return taken
