"""Checks the API key of every request, and turns errors into answers."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvconnect.server.errors import ErrorAnswer, RequestRefused, answer_of
from kvconnect.server.settings import HttpSettings
from kvconnect.trace import count

_access = logging.getLogger("kvconnect.access")

PAGE = "/page"
"""The path of the page, a file without any number; what it shows has paths below that."""

OPEN_PATHS = frozenset({"/health", PAGE})
"""The paths that need no API key."""

ADMIN_PATHS = "/v1/cache/"
"""The paths that begin so need the admin key, in the place of the API key."""

_METRICS_PATH = "/metrics"

_RESET_PATH = "/reset_prefix_cache"
"""The path that drops the cached blocks of all tenants."""


class Gate:
    """An ASGI application around another: checks keys, turns errors into answers, counts requests.

    Args:
        app: the application that answers accepted requests.
        settings: the settings with the required `api_key`; with `access_log` each answer is logged.
        admin_key: required for `ADMIN_PATHS`, and to drop the cached blocks of all tenants;
            ``None``: the paths are refused, and the API key serves for the other.
        metrics_key: required for the metrics and the numbers of the page, in the place of the API
            key; the admin key serves, too. If both are ``None``, they need the API key.
        has_prompts: holders of the API key send prompts. Otherwise they only read the page, and
            that key opens its numbers, as the admin key does.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: HttpSettings,
        admin_key: str | None = None,
        metrics_key: str | None = None,
        *,
        has_prompts: bool = True,
    ) -> None:
        self._app = app
        key = settings.api_key
        self._expected = None if key is None else key.encode()
        self._admin = None if admin_key is None else admin_key.encode()
        opening = [metrics_key, admin_key]
        if not has_prompts:
            opening = [] if key is None else [key, admin_key]
        self._metrics = [one.encode() for one in opening if one is not None]
        self._logs = settings.access_log
        if self._logs:
            _access.setLevel(logging.INFO)  # the root's is higher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            return
        scope["app"] = self  # Starlette's router then raises its refusals instead of answering them
        status = 0
        started_at = time.perf_counter()

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
            # A client that has disconnected gets no answer.
            count(f"server.answer.{status or 499}")
            if self._logs:
                _log(scope, status or 499, time.perf_counter() - started_at)

    def _check_framing(self, scope: Scope) -> None:
        # RFC 9112, 6.1: a proxy in front may obey one of the two headers, and read the rest as
        # another request.
        names = {name for name, _ in scope["headers"]}
        if {b"content-length", b"transfer-encoding"} <= names:
            raise RequestRefused(
                400,
                "Content-Length and Transfer-Encoding: send one of them",
                "ambiguous_length",
                closes=True,
            )

    def _check_key(self, scope: Scope) -> None:
        path = scope["path"]
        if path.startswith(ADMIN_PATHS) or (path == _RESET_PATH and self._admin is not None):
            if self._admin is None:
                raise RequestRefused(
                    403, "this server was started without an admin key", "no_admin_key"
                )
            _check_bearer(scope, [self._admin], "admin key")
        elif self._metrics and (path == _METRICS_PATH or path.startswith(f"{PAGE}/")):
            # Exact counts of all tenants: a client could read others' prompts by them. The page
            # has the same counts, and the hits of each stored prompt.
            _check_bearer(scope, self._metrics, "metrics key")
        elif self._expected is not None and path not in OPEN_PATHS:
            _check_bearer(scope, [self._expected], "API key")


def _check_bearer(scope: Scope, expected: Sequence[bytes], name: str) -> None:
    scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
    sent = given.strip().encode("latin-1")
    fits = [hmac.compare_digest(sent, one) for one in expected]
    if scheme.lower() != "bearer" or not any(fits):
        code = f"invalid_{name.lower().replace(' ', '_')}"
        raise RequestRefused(
            401, f"Authorization: 'Bearer' and the server's {name} are needed", code
        )


def _log(scope: Scope, status: int, seconds: float) -> None:
    # Without the query, which may contain a secret.
    fields = {
        "client": (scope.get("client") or ("",))[0],
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "elapsed_s": round(seconds, 6),
    }
    text = " ".join(map(repr, (fields["method"], fields["path"])))
    _access.info(
        "%s %s %d %.3f s", fields["client"], text, status, seconds, extra={"fields": fields}
    )


def _answer(error: Exception) -> ErrorAnswer:
    if isinstance(error, HTTPException):
        answer = ErrorAnswer(error.status_code, error.detail)
        answer.headers.update(error.headers or {})
        return answer
    return answer_of(error)
