"""Checks the API key of every request, and turns errors into answers."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvconnect.server.errors import ErrorAnswer, RequestRefused, answer_of
from kvconnect.trace import count

__all__ = ["OPEN_PATHS", "Gate"]

OPEN_PATHS = frozenset({"/health"})
"""The paths that need no API key."""


class Gate:
    """An ASGI application around another: checks the key, turns errors into answers, counts.

    Args:
        app: answers the requests that pass.
        api_key: required of clients; ``None``: none is required.
    """

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._expected = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            return
        scope["app"] = self  # what the router refuses it raises then, and does not answer itself
        status = 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._check_framing(scope)
            self._check_key(scope)
            await self._app(scope, receive, noted)
        except Exception as error:  # each has an answer
            answer = _answer(error)
            if not status:  # else the connection is cut
                response = JSONResponse(answer.body, answer.status, answer.headers)
                await response(scope, receive, noted)
            else:
                raise
        finally:
            # Nothing is sent to a client that left.
            count(f"server.answer.{status or 499}")

    def _check_framing(self, scope: Scope) -> None:
        # RFC 9112, 6.1: a proxy in front may go by the one, and take the rest for another request.
        names = {name for name, _ in scope["headers"]}
        if {b"content-length", b"transfer-encoding"} <= names:
            raise RequestRefused(
                400,
                "Content-Length and Transfer-Encoding: send one of them",
                "ambiguous_length",
                closes=True,
            )

    def _check_key(self, scope: Scope) -> None:
        if self._expected is None or scope["path"] in OPEN_PATHS:
            return
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        sent = given.strip().encode("latin-1")
        if scheme.lower() != "bearer" or not hmac.compare_digest(sent, self._expected):
            raise RequestRefused(
                401,
                "Authorization: 'Bearer' and the server's API key are needed",
                "invalid_api_key",
            )


def _answer(error: Exception) -> ErrorAnswer:
    if isinstance(error, HTTPException):
        answer = ErrorAnswer(error.status_code, error.detail)
        answer.headers.update(error.headers or {})
        return answer
    return answer_of(error)
