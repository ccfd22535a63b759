"""A connector that keeps TensorRT-LLM's KV cache in kvconnect's stores, for one rank.

``KvCacheConnectorConfig(connector_module="kvconnect.integrations.trtllm",
connector_scheduler_class="KvConnectScheduler", connector_worker_class="KvConnectWorker")``, and the
settings in the environment variable ``KVCONNECT_CONFIG``, as JSON. The reverse, TensorRT-LLM's
connectors in kvconnect's engine, is `kvconnect.integrations.trtllm_shim`.

TensorRT-LLM is imported when one of the two classes is looked up. May import the shared core and
its dependencies. Begin with `scheduler` and `worker`; both use `attachment`. `requests` has the
state of each request. `bases` finds TensorRT-LLM's own classes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvconnect.integrations.trtllm.scheduler import KvConnectScheduler
    from kvconnect.integrations.trtllm.worker import KvConnectWorker

__all__ = ["KvConnectScheduler", "KvConnectWorker"]


_MODULES = {"KvConnectScheduler": "scheduler", "KvConnectWorker": "worker"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
