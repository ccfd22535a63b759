"""A KV connector for vLLM, `KvConnect`, that keeps prompts in kvconnect's stores.

vLLM's own configuration names it: ``--kv-transfer-config '{"kv_connector": "KvConnect",
"kv_connector_module_path": "kvconnect.integrations.vllm", …}'``. May import
`kvconnect.integrations.core`, the connector below it and kernels. Begin with `connector`; only
`connector` and `exports` import vLLM.

`scheduler` is the scheduler's half, for which `steps` reads vLLM's steps and the snapshots of
recurrent states that a step leaves. `worker` is a worker's half. `messages` has the messages
between the halves. `requests` gives requests their keys; `pictures` hashes the inputs beside
tokens. `weights` detects that the model's weights were replaced. `identity` finds the settings of
the engine that shape KV, and refuses those that cannot be distinguished. `configured` checks
settings early, and records when loading may have begun. `callers` finds objects that a connector is
not given. `layouts` and `caches` describe the engine's memory; `stats` counts.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvConnect"]


def __getattr__(name: str) -> Any:
    """Returns `KvConnect`, imported on access, since vLLM is no dependency.

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
