"""The settings of tiers in the configuration that vLLM makes before it loads weights."""

from __future__ import annotations

from collections.abc import Mapping

from kvconnect.connector.io.identity import check_store
from kvconnect.integrations.vllm.callers import transfer_of_lookup
from kvconnect.integrations.vllm_tier.settings import KvConnectTierSettings
from kvconnect.integrations.vllm_tier.tier import KvConnectTier

__all__ = ["check_looked_up"]

# Of a tier's configuration; vLLM takes them out before it makes the tier.
_OF_VLLM = ("type", "module_path", "backpressure")


def check_looked_up() -> None:
    """Refuses wrong settings of tiers whose connector's class vLLM's configuration looks up.

    The store is not opened.

    Raises:
        ConfigurationError: names the field.
    """
    transfer = transfer_of_lookup()
    tiers = () if transfer is None else transfer.kv_connector_extra_config.get("secondary_tiers")
    for tier in tiers if isinstance(tiers, list) else ():
        if isinstance(tier, Mapping) and tier.get("type") == KvConnectTier.__name__:
            given = {name: value for name, value in tier.items() if name not in _OF_VLLM}
            check_store(KvConnectTierSettings(**given).connector_config())
