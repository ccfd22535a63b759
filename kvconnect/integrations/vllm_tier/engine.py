"""What of vLLM the tier is made of; none of it where vLLM is not installed.

A name that is missing though vLLM is there is an error of the import: that version has no secondary
tiers, or others.
"""

from __future__ import annotations

from importlib.util import find_spec

__all__ = [
    "JobResult",
    "Locality",
    "LookupResult",
    "Medium",
    "RequestOffloadingContext",
    "SecondaryTierManager",
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
