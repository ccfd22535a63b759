"""The abstract classes of TensorRT-LLM, in any place where a version has them (1.2 and later)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PLACES = (
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
)
_OWN = {
    "KvCacheConnectorScheduler": "kvconnect.connector.scheduler",
    "KvCacheConnectorWorker": "kvconnect.connector.worker",
}


def connector_class(name: str) -> Any:
    """Returns the class of this name; without TensorRT-LLM, kvconnect's own of the same form."""
    for place in _PLACES:
        try:
            return getattr(import_module(place), name)
        except (ImportError, AttributeError):
            continue
    return getattr(import_module(_OWN[name]), name)
