"""vLLM: `KvConnect`, a KV connector that keeps prompts in kvconnect's stores.

Named in vLLM's own configuration: ``--kv-transfer-config '{"kv_connector": "KvConnect",
"kv_connector_module_path": "kvconnect.integrations.vllm", …}'``. May import
`kvconnect.integrations.core`, the connector below it and kernels. Begin with `connector`; it and
`exports` are all that imports vLLM. The scheduler's half of its work is in `scheduler`, which has
vLLM's steps read by `steps`, a worker's in `worker`, and what they send each other in `messages`.
`naming` gives requests their keys: `prompts`, `pictures` and `lora` say what of a request shapes
KV. `weights` and `weight_calls` find that the model's weights were replaced. `identity` says what
of the engine's configuration shapes KV, and refuses what cannot be told apart; `configured` says
since when, and checks the settings; `callers` finds what a connector is not given. `layouts`,
`caches` and `packing` describe the engine's memory; `stats` counts.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvConnect"]


def __getattr__(name: str) -> Any:
    """Returns `KvConnect`, imported when it is asked for: vLLM is no dependency.

    Raises:
        ConfigurationError: vLLM looks the class up for settings that are wrong; names the field.
    """
    if name == "KvConnect":
        from kvconnect.integrations.vllm.configured import check_looked_up, lookup_times
        from kvconnect.integrations.vllm.connector import KvConnect

        check_looked_up()
        lookup_times.note()
        return KvConnect
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
