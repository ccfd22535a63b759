"""The settings of a tier's configuration, beside its type and module; checked at their lookup."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from kvconnect.backends.registry import codecs_of
from kvconnect.config import KvCacheConnectorConfig
from kvconnect.connector.io.identity import check_store
from kvconnect.errors import ConfigurationError
from kvconnect.integrations.core.settings import MetricsSettings
from kvconnect.integrations.vllm.callers import transfer_of_lookup

# Fields of a tier's configuration that vLLM removes before it makes the tier.
_OF_VLLM = ("type", "module_path", "backpressure")
_OF_CONNECTOR = {
    *("url", "codec", "key_file", "load_timeout_s", "save_timeout_s"),
    *("staging_bytes", "verify_frames"),
}
_EXAMPLE = "disk:///var/cache/kv?capacity=200GiB"


class KvConnectTierSettings(MetricsSettings):
    """The settings of the store, and the timeouts of a tier.

    Attributes:
        url: the store, for example ``disk:///var/cache/kv?capacity=200GiB``.
        namespace: chunks are shared only by engines that give the same one.
        model_revision: stands for the weights, which are then not read; for a model that has no
            directory, and for one whose files are too slow to read.
        codec, key_file: as in `KvCacheConnectorConfig`, but lossless.
        lookup_timeout_ms: a request whose chunks the store has not found by then computes them.
            Other requests do not wait.
        load_timeout_s: deadline of a load, counted from its submission.
        save_timeout_s: deadline of a call that saves, and of draining at shutdown.
        staging_bytes: host memory for chunks on their way.
        verify_frames: check every loaded chunk; off is for measuring only, and is logged.
        locality: where the store is, for requests that name the tiers they may load from.
    """

    url: str
    namespace: str | None = None
    model_revision: str | None = None
    codec: str | None = None
    key_file: str | None = None
    lookup_timeout_ms: Annotated[float, Field(gt=0)] = 1000.0
    load_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    save_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    staging_bytes: Annotated[int, Field(gt=0)] = 256 << 20
    verify_frames: bool = True
    locality: Literal["LOCAL", "REMOTE"] | None = None

    def __init__(self, /, **values: Any) -> None:
        if not values.get("url"):
            raise ConfigurationError(f"KvConnectTier.url: is missing; give a store: '{_EXAMPLE}'")
        super().__init__(**values)
        rounded = codecs_of(self.url, codec=self.codec, key_file=self.key_file).quantized
        if rounded:
            raise ConfigurationError(
                f"KvConnectTier.codec: {rounded} rounds numbers, and a tier is given vLLM's pages "
                "as bytes; use zstd, lz4 or aes-gcm, or leave it out"
            )

    def connector_config(self) -> KvCacheConnectorConfig:
        """Returns the settings in the form of the built-in pair."""
        return KvCacheConnectorConfig(**self.model_dump(include=_OF_CONNECTOR))


def check_looked_up() -> None:
    """Refuses wrong settings of tiers whose connector's class vLLM's configuration looks up.

    The store is not opened.

    Raises:
        ConfigurationError: names the field.
    """
    transfer = transfer_of_lookup()
    tiers = () if transfer is None else transfer.kv_connector_extra_config.get("secondary_tiers")
    for tier in tiers if isinstance(tiers, list) else ():
        if isinstance(tier, Mapping) and tier.get("type") == "KvConnectTier":
            given = {name: value for name, value in tier.items() if name not in _OF_VLLM}
            check_store(KvConnectTierSettings(**given).connector_config())
