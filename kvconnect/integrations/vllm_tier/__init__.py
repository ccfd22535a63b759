"""A secondary tier of vLLM's own offloading, over kvconnect's stores.

vLLM keeps offloaded blocks in host memory, its primary tier, and asks secondary tiers for other
blocks. It calls them in its scheduler, one chunk at a time. So no call here blocks, except for a
moment in steps in which requests wait for the store (`pause`). A fault of the store costs time,
nothing else.

Begin with `tier`, which vLLM calls. `identity` names a stored chunk. `lookups` and `transfers`
use the store through the parts of `kvconnect.connector.io`. `weights` and `requests` detect what
vLLM's names do not cover. May import the connector's rooms, the digest, the vocabulary, and of
`kvconnect.integrations.vllm` the modules about weights. vLLM is no dependency: only `tier` imports
it, and functions that it calls. `settings` are checked before the weights are loaded.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvConnectTier"]


def __getattr__(name: str) -> Any:
    """Returns `KvConnectTier`, or vLLM's ``OffloadingConnector``; imported on access.

    vLLM looks a connector's class up when it is configured, and a tier's when the weights are
    loaded. So a typo in a tier's settings is found before only if the connector comes from here, as
    this is its ``kv_connector_module_path``.

    Raises:
        ConfigurationError: vLLM looks the connector up for settings that are wrong; names the
            field.
    """
    if name == "KvConnectTier":
        from kvconnect.integrations.vllm_tier.tier import KvConnectTier

        return KvConnectTier
    if name == "OffloadingConnector":
        from kvconnect.integrations.vllm_tier.settings import check_looked_up

        check_looked_up()
        from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector

        return offloading_connector.OffloadingConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
