"""kvconnect keeps the KV cache of LLM engines and moves it to and from external stores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvconnect.backend import Backend, Capabilities, StoredBlock
from kvconnect.config import (
    KvCacheConfig,
    KvCacheConnectorConfig,
    KvCacheRetentionConfig,
    TokenRangeRetentionConfig,
)
from kvconnect.errors import ConfigurationError, KvConnectError
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout
from kvconnect.request import LlmRequest, SamplingParams

if TYPE_CHECKING:
    from kvconnect.backends.registry import open_backend
    from kvconnect.engine.llm import LLM

__all__ = [
    "LLM",
    "Backend",
    "BlockKey",
    "Capabilities",
    "ConfigurationError",
    "KvCacheConfig",
    "KvCacheConnectorConfig",
    "KvCacheLayout",
    "KvCacheRetentionConfig",
    "KvConnectError",
    "LlmRequest",
    "SamplingParams",
    "StoredBlock",
    "TokenRangeRetentionConfig",
    "__version__",
    "open_backend",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # These bring in more than the vocabulary: LLM imports transformers, which takes seconds.
    if name == "LLM":
        try:
            from kvconnect.engine.llm import LLM
        except ModuleNotFoundError as error:
            if error.name not in {"transformers", "tokenizers", "safetensors"}:
                raise
            from kvconnect.errors import MissingExtra

            raise MissingExtra("LLM", "hf") from error
        return LLM
    if name == "open_backend":
        from kvconnect.backends.registry import open_backend

        return open_backend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
