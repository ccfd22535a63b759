"""The settings of an adapter in an engine's own configuration: one flat dictionary."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field

from kvconnect.config import KvCacheConnectorConfig
from kvconnect.errors import ConfigurationError, nearest
from kvconnect.settings import Settings
from kvconnect.text import shown

_CONNECTOR_FIELDS = (
    "url",
    "codec",
    "key_file",
    "namespace",
    "lookup_timeout_ms",
    "load_timeout_s",
    "save_timeout_s",
    "min_load_tokens",
    "save_on",
    "on_backlog",
    "staging_bytes",
    "verify_frames",
)


class MetricsSettings(Settings):
    """The address and port of an engine's processes for Prometheus.

    Attributes:
        metrics_port: the first port to try; ``None``: nothing listens.
        metrics_address: the metrics address of this machine; by default programs of other machines
            are not answered.
    """

    metrics_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    metrics_address: str = "127.0.0.1"


class OwnSettings(MetricsSettings):
    """The settings beside the fields of `KvCacheConnectorConfig`.

    Attributes:
        model_revision: stands for the weights, which are then not read; for example
            ``org/name@commit``.
        producer_timeout_s: how long a request waits for blocks that another engine announced, and
            that are not in the store yet.
        load_decisions: compute a prompt if its load is predicted to take longer; False: load
            whatever the store has.
    """

    model_revision: str | None = None
    producer_timeout_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2.0
    load_decisions: bool = False


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The parsed settings of an adapter.

    Attributes:
        engine: the engine's name: ``vllm``, ``sglang``, …
        connector: the settings of the store.
        own: the other settings.
    """

    engine: str
    connector: KvCacheConnectorConfig
    own: OwnSettings

    @classmethod
    def of(
        cls,
        engine: str,
        given: Mapping[str, Any],
        *,
        where: str,
        passed_over: Collection[str] = (),
        without: Collection[str] = (),
    ) -> EngineSettings:
        """Returns the settings that `given` holds.

        Args:
            engine: the engine's name, as it stands in namespaces and metrics.
            given: field names and values, as the user wrote them.
            where: the engine's name for `given`, for errors.
            passed_over: names in `given` that the engine put there for itself.
            without: fields that have no effect in this engine; they are refused as unknown ones.

        Raises:
            ConfigurationError: ``url`` is missing, a field is unknown or has a bad value; names it.
        """
        known = (*_CONNECTOR_FIELDS, *OwnSettings.model_fields)
        valid = tuple(name for name in known if name not in without)
        fields = {name: value for name, value in given.items() if name not in passed_over}
        namespace = fields.pop("namespace", "engine")
        if namespace not in ("engine", "shared"):
            raise ConfigurationError(
                f"{where}: namespace={shown(namespace)}: give 'engine', the engine's own and the "
                "default, or 'shared'"
            )
        if namespace == "shared":
            fields["namespace"] = namespace
        for name in fields:
            if name not in valid:
                raise ConfigurationError(
                    f"{where}: unknown field {shown(name)}; {nearest(str(name), valid)}"
                )
        if not fields.get("url"):
            raise ConfigurationError(
                f"{where}.url: is missing; name a store, for example "
                "'disk:///var/cache/kv?capacity=200GiB'"
            )
        try:
            connector = KvCacheConnectorConfig(
                # Engines accept whole blocks only.
                save_partial_tails=False,
                **{name: value for name, value in fields.items() if name in _CONNECTOR_FIELDS},
            )
            own = OwnSettings(
                **{name: value for name, value in fields.items() if name not in _CONNECTOR_FIELDS}
            )
        except ConfigurationError as error:
            raise ConfigurationError(f"{where}: {error}") from error
        return cls(engine, connector, own)

    @property
    def is_shared(self) -> bool:
        """Returns whether blocks may be exchanged with other engines through the store."""
        return self.connector.namespace is not None

    def without_saves(self) -> EngineSettings:
        """Returns a copy for an engine that only loads: blocks of priority 0 are not saved."""
        return replace(self, connector=self.connector.model_copy(update={"min_priority": 1}))
