"""What a user sets of the HTTP server."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from kvconnect.settings import Settings

__all__ = ["ServerSettings"]


class ServerSettings(Settings):
    """Where a server listens, who may use it, and what it takes at most.

    Attributes:
        model_name: what clients call the model.
        host: address or name to listen on; beyond loopback only with an `api_key`.
        port: TCP port; 0: any that is free.
        api_key: what clients must send as ``Authorization: Bearer …``; ``None``: nothing.
        max_completions: completions that run or wait at once at most; more are answered with 429.
        max_body_bytes: of one request.
        max_connections: requests on further ones are answered with 503.
        client_timeout_s: how long a client may take to send a request, and to take what was
            written to it; then its connection is cut.
        shutdown_timeout_s: how long a shutdown waits for running requests; then they are aborted.
    """

    model_name: Annotated[str, Field(min_length=1)]
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    api_key: Annotated[str | None, Field(repr=False)] = None
    max_completions: Annotated[int, Field(ge=1)] = 320
    max_body_bytes: Annotated[int, Field(ge=1)] = 4 << 20
    max_connections: Annotated[int, Field(ge=1)] = 4096
    client_timeout_s: Annotated[float, Field(ge=0.001, le=1e6)] = 60.0  # the system counts ms
    shutdown_timeout_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0

    @model_validator(mode="after")
    def _key_fits_a_header(self) -> Self:
        # Checked here and not at the field, whose errors show what was given.
        key = self.api_key
        if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
            raise ValueError("api_key: must be printable ASCII without spaces, and not empty")
        return self
