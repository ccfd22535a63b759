"""The settings of the router."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from kvconnect.server.settings import HttpSettings, Seconds, Secret


class RouteSettings(HttpSettings):
    """The settings of the router.

    Attributes:
        prefill: URLs of prefill servers; none: decode servers compute prompts themselves.
        decode: URLs of decode servers.
        instance_api_key: the API key of these servers; ``None``: they require none.
        router_secret: the secret that they require with ``kv_transfer_params``; ``None``: none.
        stream_layers: true to send a prompt to both servers at the same time, so that each layer is
            fetched while the next one is computed.
        max_requests: the most requests that run at once; further ones are answered with 429.
        prefill_timeout_s: seconds for a prompt on prefill servers, all attempts together; then the
            decode server computes it.
        request_timeout_s: seconds for an answer to begin, and again for it to end; then the request
            is aborted.
        health_interval_s: seconds between health checks of each server.
        health_timeout_s: seconds without an answer after which a server is down; its requests are
            sent to another one.
        max_prefixes: the most prefixes of prompts recorded for each server.
    """

    prefill: tuple[str, ...] = ()
    decode: Annotated[tuple[str, ...], Field(min_length=1)]
    instance_api_key: Secret = None
    router_secret: Secret = None
    stream_layers: bool = True
    max_requests: Annotated[int, Field(ge=1)] = 1024
    prefill_timeout_s: Seconds = 60.0
    request_timeout_s: Seconds = 600.0
    health_interval_s: Seconds = 1.0
    health_timeout_s: Seconds = 5.0
    max_prefixes: Annotated[int, Field(ge=1)] = 65536

    @field_validator("prefill", "decode")
    @classmethod
    def _are_servers(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for number, url in enumerate(urls):
            parts = urlsplit(url)
            # The URL is not shown: it may hold a password.
            named = parts.hostname and not parts.username and parts.port != 0
            if parts.scheme not in {"http", "https"} or not named:
                raise ValueError(
                    f"number {number + 1} is no URL of a server; give 'http://host:port', "
                    "without a user"
                )
            if parts.path not in {"", "/", "/v1", "/v1/"} or parts.query or parts.fragment:
                raise ValueError(f"number {number + 1} has a path; give 'http://host:port'")
        plain = tuple(url.rstrip("/").removesuffix("/v1") for url in urls)
        if len(set(plain)) < len(plain):
            raise ValueError("a server is named twice; give each once")
        return plain
