"""The settings of the publisher of events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Self, TypeAlias
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from kvconnect.settings import Settings
from kvconnect.text import shown


class EventsConfig(Settings):
    """The sockets of stored and removed blocks, as `vllm serve --kv-events-config` has them.

    Messages hold the token ids of prompts, and ZeroMQ authenticates no client: listen where only
    trusted machines connect.

    Attributes:
        endpoint: ``tcp://HOST:PORT`` to listen on; the host may be ``*``, port 0 takes a free one.
        replay_endpoint: the endpoint for requests of missed batches; ``None``: the port after that
            of `endpoint`, or a free one if that is 0.
        topic: first frame of every message.
        buffer_steps: the number of newest batches that are kept for replay, at most 64 MiB
            together.
        max_queued: the most events that wait for the publisher; beyond it the oldest are dropped.
    """

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    buffer_steps: Annotated[int, Field(ge=1)] = 10_000
    max_queued: Annotated[int, Field(ge=1)] = 10_000

    @field_validator("endpoint", "replay_endpoint")
    @classmethod
    def _is_endpoint(cls, value: str | None) -> str | None:
        if value is not None:
            _port(value)
        return value

    @model_validator(mode="after")
    def _has_next_port(self) -> Self:
        if self.replay_endpoint is None and _port(self.endpoint) == _LAST_PORT:
            raise ValueError(f"replay_endpoint: there is no port after {_LAST_PORT}; give one")
        return self

    @property
    def replay(self) -> str:
        """Returns the endpoint of replays."""
        if self.replay_endpoint is not None:
            return self.replay_endpoint
        port = _port(self.endpoint)
        host = self.endpoint.rpartition(":")[0]
        return f"{host}:{port + 1 if port else 0}"

    @classmethod
    def of(cls, given: Events | None) -> EventsConfig | None:
        """Returns the settings in `given`, which is an endpoint, a mapping or a configuration.

        Raises:
            ConfigurationError: the settings are wrong.
        """
        if given is None:
            return None
        return cls(endpoint=given) if isinstance(given, str) else cls.given("events", given)


Events: TypeAlias = EventsConfig | Mapping[str, object] | str

_LAST_PORT = (1 << 16) - 1


def _port(endpoint: str) -> int:
    message = f"{shown(endpoint)} must be 'tcp://HOST:PORT', as 'tcp://127.0.0.1:5557'"
    scheme, _, address = endpoint.partition("://")
    host, _, port = address.rpartition(":")
    if scheme != "tcp" or not host or not (port.isascii() and port.isdigit()):
        raise ValueError(message)
    try:
        parts = urlsplit(endpoint)
    except ValueError as error:
        raise ValueError(message) from error
    if parts.path or parts.query or parts.fragment or parts.username or int(port) > _LAST_PORT:
        raise ValueError(message)
    return int(port)
