"""The settings of an HTTP server."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from kvconnect.address import host_and_port
from kvconnect.settings import Settings

_BODIES = 64
"""The number of bodies of the largest size that may be in memory at once."""

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]

Secret = Annotated[str | None, Field(repr=False)]
"""A secret that is sent in a header: printable ASCII without spaces; ``None``: there is none."""


class HttpSettings(Settings):
    """The settings of any HTTP server: its address, its clients, and their limits.

    Attributes:
        host: address or name to listen on; beyond loopback only with an `api_key`.
        port: TCP port; 0: any that is free.
        api_key: the key that clients must send as ``Authorization: Bearer …``; ``None``: none.
        max_body_bytes: the most bytes of one request's body.
        max_connections: the most connections; requests on further ones are answered with 503.
        client_timeout_s: seconds that a client may take to send a request, and to read its answer;
            then the connection is closed.
        shutdown_timeout_s: seconds that a shutdown waits for running requests before it aborts
            them.
        access_log: true to log a line for each answer, with the logger ``kvconnect.access``.
    """

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    api_key: Secret = None
    max_body_bytes: Annotated[int, Field(ge=1)] = 4 << 20
    max_connections: Annotated[int, Field(ge=1)] = 4096
    client_timeout_s: Annotated[float, Field(ge=0.001, le=1e6)] = 60.0  # the system counts ms
    shutdown_timeout_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    access_log: bool = False

    @property
    def max_bodies_bytes(self) -> int:
        """The most bytes of all bodies in memory together, not counting 64 KiB of each."""
        return _BODIES * self.max_body_bytes

    @model_validator(mode="after")
    def _secrets_fit_headers(self) -> Self:
        # Checked here and not at the fields, whose errors would show the values.
        for name in (name for name, field in type(self).model_fields.items() if not field.repr):
            secret = getattr(self, name)
            if secret is not None and not (
                secret and secret.isascii() and secret.isprintable() and " " not in secret
            ):
                raise ValueError(f"{name}: must be printable ASCII without spaces, and not empty")
        return self


class PageSettings(HttpSettings):
    """The settings of a server of the page of a store alone.

    Attributes:
        admin_key: required for texts, keys and digests of salts; ``None``: they are refused.
    """

    admin_key: Secret = None


class ServerSettings(HttpSettings):
    """The settings of a server over one engine.

    Attributes:
        model_names: the clients' names of the model; answers use the first one.
        require_salt: requests without a ``cache_salt`` are refused.
        page: serve the page that shows the cache, under ``/page``.
        max_completions: completions that run or wait at once at most; more are answered with 429.
        role: ``prefill`` publishes prompts that a router sends it, ``decode`` fetches them,
            ``both`` does either, and then needs a `router_secret`; ``None``: requests with
            ``kv_transfer_params`` are refused. In every role other requests are answered, too.
        router_secret: required of requests with ``kv_transfer_params`` in the header
            `ROUTER_SECRET_HEADER`; ``None``: only what all requests need.
        admin_key: required for the verbs on stored prompts, ``/v1/cache/…``, in the place of the
            `api_key`; ``None``: they are refused.
        metrics_key: required for ``/metrics`` and the numbers of the page, in the place of the
            `api_key`; the `admin_key` serves there, too. If both are ``None``, the `api_key` is
            required.
        max_import_bytes: of all files together that clients send to be imported; they lie in the
            directory for temporary files until they were.
        peers: ``host`` or ``host:port`` of prefill servers that prompts may be fetched from; none:
            those of this machine.
    """

    model_names: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
    require_salt: bool = False
    page: bool = False
    max_completions: Annotated[int, Field(ge=1)] = 320
    role: Literal["prefill", "decode", "both"] | None = None
    router_secret: Secret = None
    admin_key: Secret = None
    metrics_key: Secret = None
    max_import_bytes: Annotated[int, Field(ge=1)] = 16 << 30
    peers: tuple[str, ...] = ()

    @field_validator("peers")
    @classmethod
    def _are_addresses(cls, peers: tuple[str, ...]) -> tuple[str, ...]:
        for peer in peers:
            host_and_port(peer if ":" in peer.rpartition("]")[2] else f"{peer}:0")
        return peers

    @model_validator(mode="after")
    def _trusts_somebody(self) -> Self:
        if self.role == "both" and self.router_secret is None:
            raise ValueError(
                "router_secret: is needed with role 'both', whose clients are not only a router; "
                "set KVCONNECT_ROUTER_SECRET, here and for the router"
            )
        return self
