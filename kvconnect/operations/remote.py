"""The verb ``warm`` by a running server, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from kvconnect.errors import BackendUnavailable, ConfigurationError
from kvconnect.operations.progress import Progress
from kvconnect.operations.saving import Saved

__all__ = ["warm_by_server"]

_TIMEOUT_S = 60.0
"""An answer has an event each second."""

_OURS = {
    *("invalid_request_error", "authentication_error", "permission_denied_error"),
    "not_found_error",
}
"""The types of errors that the sender of a request can correct."""


def warm_by_server(
    server: str, body: Mapping[str, object], done: Saved, *, admin_key: str | None
) -> None:
    """Makes the server compute and save what its store lacks of prompts; blocks until it is done.

    Leaving it, by an interruption, ends the work of the server.

    Args:
        server: its URL, as ``http://host:8000``.
        body: ``prompts``, ``messages``, ``salt`` and ``lora``, as of `Which`.
        done: its counts are those that the server reports meanwhile.
        admin_key: of the server.

    Raises:
        ConfigurationError: a bad URL or key, or a request that the server refuses.
        BackendUnavailable: the server cannot be reached, or fails.
    """
    parts = urlsplit(server)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigurationError(f"server: '{server}' is no URL; give one as http://host:8000")
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=_TIMEOUT_S)
    headers = {"Content-Type": "application/json"}
    if admin_key is not None:
        headers["Authorization"] = f"Bearer {admin_key}"
    path = f"{parts.path.rstrip('/').removesuffix('/v1')}/v1/cache/warm"
    try:
        connection.request("POST", path, json.dumps({**body, "stream": True}), headers)
        answer = connection.getresponse()
        with Progress("warm", 0, "tokens") as progress:
            for event in _events(answer):
                if "error" in event:
                    raise _error(server, event["error"])
                progress.advance(event["tokens"] - done.tokens)
                for field in fields(done):
                    setattr(done, field.name, event.get(field.name, True))
    except (HTTPException, OSError, ValueError) as error:
        if isinstance(error, (ConfigurationError, BackendUnavailable)):
            raise
        raise BackendUnavailable(f"{server}: {error}") from error
    finally:
        connection.close()


def _events(answer: HTTPResponse) -> Iterator[dict[str, Any]]:
    if answer.status != 200:
        yield json.loads(answer.read())
        return
    for line in answer:
        text = line.decode().strip()
        if text == "data: [DONE]":
            return
        if text:
            yield json.loads(text.removeprefix("data: "))
    raise BackendUnavailable("the server's answer ended too early")


def _error(server: str, error: Mapping[str, str]) -> ConfigurationError | BackendUnavailable:
    kind = ConfigurationError if error["type"] in _OURS else BackendUnavailable
    return kind(f"{server}: {error['message']}")
