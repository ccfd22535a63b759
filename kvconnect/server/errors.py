"""Maps the error of a request to a status and OpenAI's error object.

::

    RequestRefused              a status of its own: 400, 401, 403, 404, 408, 409, 413, 415, 504
    ├── Busy                    429: a limit is reached; try again after a moment
    ├── Dropped                 408: an unfinished body was dropped at a limit
    └── ShuttingDown            503: this server is shutting down

`answer_of` maps all other errors.
"""

from __future__ import annotations

import logging
from typing import Any

from kvconnect.errors import ConfigurationError, EngineClosed, KvConnectError, RetryLater

_log = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_denied_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
    504: "timeout_error",
}
_RETRY_AFTER_S = 1


class RequestRefused(Exception):
    """The error that answers a request which had no effect.

    Attributes:
        status: the status of HTTP.
        code: the code of OpenAI's error object.
        closes: true if the connection ends with the answer, because more of this request may still
            arrive.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, *, closes: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.closes = closes


class Busy(RequestRefused):
    """The error of a request beyond the limits of running and waiting requests."""

    def __init__(self, message: str) -> None:
        super().__init__(429, message, "queue_full")


class Dropped(RequestRefused):
    """The error of a body that was dropped in favour of others."""

    def __init__(self) -> None:
        super().__init__(
            408,
            "the body came too slowly while many others were sent; send it again",
            "dropped",
            closes=True,
        )


class ShuttingDown(RequestRefused):
    """The error of requests during a shutdown: new ones, and aborted ones."""

    def __init__(self) -> None:
        super().__init__(503, "the server is shutting down", "shutting_down", closes=True)


class ErrorAnswer:
    """An error for a client, as an answer or within a stream.

    Attributes:
        status: the status of HTTP.
        body: OpenAI's error object.
        headers: further headers of the answer.
    """

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        self.status = status
        self.body: dict[str, Any] = {
            "error": {
                "message": message,
                "type": _TYPES.get(status, "invalid_request_error"),
                "param": None,
                "code": code,
            }
        }
        self.headers: dict[str, str] = {}
        if status in {429, 503}:
            self.headers["Retry-After"] = str(_RETRY_AFTER_S)
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"


def answer_of(error: Exception) -> ErrorAnswer:
    """Returns the answer to a request that failed by `error`; logs errors of the server itself."""
    match error:
        case RequestRefused():
            answer = ErrorAnswer(error.status, str(error), error.code)
            if error.closes:
                answer.headers["Connection"] = "close"
            return answer
        case ConfigurationError():
            return ErrorAnswer(400, str(error))
        case RetryLater() | EngineClosed():
            return ErrorAnswer(503, str(error))
        case KvConnectError():
            _log.error("a request failed: %s", error, exc_info=error)
            return ErrorAnswer(500, str(error))
        case _:
            _log.error("a request failed: %s", error, exc_info=error)
            # The message may reveal facts about this machine, so it is not sent.
            return ErrorAnswer(500, f"the request failed ({type(error).__name__})")
