"""The classes of vLLM that the tier uses; ``None`` or `object` if vLLM is not installed.

If vLLM is installed and a name is missing, the import fails: that version has no secondary tiers,
or others.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

__all__ = [
    "JobResult",
    "Locality",
    "LookupResult",
    "Medium",
    "RequestOffloadingContext",
    "SecondaryTierManager",
    "offloading_connector",
]

if find_spec("vllm") is not None:
    from vllm.v1.kv_offload.base import (
        Locality,
        LookupResult,
        Medium,
        RequestOffloadingContext,
    )
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
else:
    JobResult = Locality = LookupResult = Medium = RequestOffloadingContext = None
    SecondaryTierManager = object


def offloading_connector() -> Any:
    """Returns vLLM's connector that has tiers; imported on the call, since it is large."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector as module

    return module.OffloadingConnector
