"""The KV cache of LLM engines, kept across requests, and moved to and from external stores."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvconnect.errors import (
    BackendUnavailable,
    ConfigurationError,
    KvConnectError,
    MissingExtra,
)

if TYPE_CHECKING:
    from kvconnect.backend import Backend, Capabilities, Child, StoredBlock, StoredEntry
    from kvconnect.backends.registry import open_backend
    from kvconnect.cache.block_manager import BlockManager
    from kvconnect.cache.kv_cache_manager import KVCacheManager
    from kvconnect.cache_options import CacheOptions
    from kvconnect.config import (
        KvCacheConfig,
        KvCacheConnectorConfig,
        KvCacheRetentionConfig,
        TokenRangeRetentionConfig,
        TransferConfig,
    )
    from kvconnect.connector.data import SchedulerOutput
    from kvconnect.connector.disagg.connectors import DecodeConnector, PrefillConnector
    from kvconnect.connector.scheduler import KvCacheConnectorScheduler
    from kvconnect.connector.worker import KvCacheConnectorWorker
    from kvconnect.engine.llm import LLM
    from kvconnect.engine.request.output import EngineStats, RequestOutput, StreamChunk
    from kvconnect.keys import BlockKey
    from kvconnect.layout import KvCacheLayout
    from kvconnect.operations.prompt_store import PromptStore
    from kvconnect.request import LlmRequest, SamplingParams

__all__ = [
    "LLM",
    "Backend",
    "BackendUnavailable",
    "BlockKey",
    "BlockManager",
    "CacheOptions",
    "Capabilities",
    "Child",
    "ConfigurationError",
    "DecodeConnector",
    "EngineStats",
    "KVCacheManager",
    "KvCacheConfig",
    "KvCacheConnectorConfig",
    "KvCacheConnectorScheduler",
    "KvCacheConnectorWorker",
    "KvCacheLayout",
    "KvCacheRetentionConfig",
    "KvConnectError",
    "LlmRequest",
    "PrefillConnector",
    "PromptStore",
    "RequestOutput",
    "SamplingParams",
    "SchedulerOutput",
    "StoredBlock",
    "StoredEntry",
    "StreamChunk",
    "TokenRangeRetentionConfig",
    "TransferConfig",
    "__version__",
    "open_backend",
]

__version__ = "0.1.0"


_MODULES = {
    "LLM": "engine.llm",
    "Backend": "backend",
    "BlockKey": "keys",
    "BlockManager": "cache.block_manager",
    "CacheOptions": "cache_options",
    "Capabilities": "backend",
    "Child": "backend",
    "DecodeConnector": "connector.disagg.connectors",
    "EngineStats": "engine.request.output",
    "KVCacheManager": "cache.kv_cache_manager",
    "KvCacheConfig": "config",
    "KvCacheConnectorConfig": "config",
    "KvCacheConnectorScheduler": "connector.scheduler",
    "KvCacheConnectorWorker": "connector.worker",
    "KvCacheLayout": "layout",
    "KvCacheRetentionConfig": "config",
    "LlmRequest": "request",
    "PrefillConnector": "connector.disagg.connectors",
    "PromptStore": "operations.prompt_store",
    "RequestOutput": "engine.request.output",
    "SamplingParams": "request",
    "SchedulerOutput": "connector.data",
    "StoredBlock": "backend",
    "StoredEntry": "backend",
    "StreamChunk": "engine.request.output",
    "TokenRangeRetentionConfig": "config",
    "TransferConfig": "config",
    "open_backend": "backends.registry",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: torch and transformers take seconds, which ``kvconnect --help`` must
    # not.
    if name in {"backend", "config", "keys", "layout", "request"}:
        return import_module(f"kvconnect.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = getattr(import_module(f"kvconnect.{_MODULES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name not in {"transformers", "tokenizers", "safetensors"}:
            raise
        raise MissingExtra(name, "hf") from error
    globals()[name] = found  # later lookups do not call this function
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
