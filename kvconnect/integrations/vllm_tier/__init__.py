"""A secondary tier of vLLM's own offloading, over kvconnect's stores.

vLLM keeps offloaded blocks in host memory, its primary tier, and asks the tiers behind that for
what is not there. It calls them in its scheduler, one chunk at a time; so nothing here blocks
there, but for a moment in steps in which requests wait for the store (`pause`), and whatever a
store does costs time, nothing else.

Begin with `tier`, which is what vLLM calls; `identity` says what a stored chunk is of, `lookups`,
`loads` and `saves` go to the store through the parts of `kvconnect.connector.offload`; `weights`
and `requests` find what vLLM's names do not say. May import the connector's rooms, the digest, the
vocabulary, and of `kvconnect.integrations.vllm` what says which weights compute. vLLM is never a
dependency: `engine` is the only module that imports it.
"""

from __future__ import annotations

from kvconnect.integrations.vllm_tier.tier import KvConnectTier

__all__ = ["KvConnectTier"]
