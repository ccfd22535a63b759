"""A secondary tier of vLLM's own offloading, over kvconnect's stores.

vLLM keeps offloaded blocks in host memory, its primary tier, and asks secondary tiers for other
blocks. It calls them in its scheduler, one chunk at a time. So no call here blocks, except for a
moment in steps in which requests wait for the store (`pause`). A fault of the store costs time,
nothing else.

Begin with `tier`, which vLLM calls. `identity` names a stored chunk. `lookups`, `loads` and `saves`
use the store through the parts of `kvconnect.connector.io`. `weights` and `requests` detect what
vLLM's names do not cover. May import the connector's rooms, the digest, the vocabulary, and of
`kvconnect.integrations.vllm` the modules about weights. vLLM is never a dependency: `engine` is the
only module that imports it. `configured` checks settings before the weights are loaded.
"""

from __future__ import annotations

from typing import Any

from kvconnect.integrations.vllm_tier.tier import KvConnectTier

__all__ = ["KvConnectTier"]


def __getattr__(name: str) -> Any:
    """Returns vLLM's ``OffloadingConnector`` where this is its ``kv_connector_module_path``.

    vLLM looks a connector's class up when it is configured, and a tier's when the weights are
    loaded. So a typo in a tier's settings is found before only if the connector comes from here.

    Raises:
        ConfigurationError: vLLM looks the class up for settings that are wrong; names the field.
    """
    if name == "OffloadingConnector":
        from kvconnect.integrations.vllm_tier.configured import check_looked_up
        from kvconnect.integrations.vllm_tier.engine import offloading_connector

        check_looked_up()
        return offloading_connector()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
