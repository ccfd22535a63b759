"""What an engine is made with: the arguments of `LLM`, checked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvconnect.cache.resource_manager import KVCacheManagerFactory
from kvconnect.config import KvCacheConfig, KvCacheConnectorConfig
from kvconnect.connector.offload.store import check_store
from kvconnect.engine.attachment import Connector, config_of
from kvconnect.engine.checkpoint.hub_cache import model_directory
from kvconnect.engine.ranks.settings import check_tensor_parallel_size
from kvconnect.engine.sampling.drafts import NgramSpeculation, Speculation
from kvconnect.engine.scheduler import SchedulingPolicy
from kvconnect.errors import ConfigurationError
from kvconnect.text import shown

__all__ = ["EngineOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The arguments of `LLM`, which says what they mean; nothing was loaded or started yet.

    Attributes:
        directory: of the model.
        kv_cache: the KV cache on the device.
        connector: where KV blocks are kept beyond it; ``None``: nowhere.
        manager: makes the cache manager.
        dtype, device: by their names.
        model_revision, max_num_tokens, enable_chunked_prefill, max_batch_size, max_logprobs,
            scheduling, tensor_parallel_size: as they were given.
        speculation: of greedy requests; ``None``: none.
    """

    directory: Path
    kv_cache: KvCacheConfig
    connector: KvCacheConnectorConfig | None
    manager: KVCacheManagerFactory
    dtype: str
    device: str
    model_revision: str | None
    max_num_tokens: int
    enable_chunked_prefill: bool
    max_batch_size: int
    max_logprobs: int
    scheduling: SchedulingPolicy
    speculation: NgramSpeculation | None
    tensor_parallel_size: int

    @classmethod
    def checked(
        cls,
        model: str | Path,
        *,
        kv_cache: KvCacheConfig | Mapping[str, object] | None,
        connector: Connector | None,
        kv_cache_manager: KVCacheManagerFactory | None,
        dtype: object,
        device: object,
        model_revision: str | None,
        max_num_tokens: int,
        enable_chunked_prefill: bool,
        max_batch_size: int,
        max_logprobs: int,
        scheduling: SchedulingPolicy,
        speculative: Speculation | None,
        tensor_parallel_size: int,
    ) -> Self:
        """Of what a user gave.

        Raises:
            ConfigurationError: an argument is wrong; names it, its value and what is right.
        """
        _check_count("max_num_tokens", max_num_tokens)
        _check_count("max_batch_size", max_batch_size)
        _check_max_logprobs(max_logprobs)
        _check_bool("enable_chunked_prefill", enable_chunked_prefill)
        check_tensor_parallel_size(tensor_parallel_size, kv_cache_manager)
        config = config_of(connector)
        if config is not None:
            check_store(config)
        return cls(
            kv_cache=KvCacheConfig()
            if kv_cache is None
            else KvCacheConfig.given("kv_cache", kv_cache),
            connector=config,
            speculation=NgramSpeculation.of(speculative),
            manager=_manager_factory(kv_cache_manager),
            directory=_directory(model),
            dtype=_name(dtype),
            device=_name(device),
            model_revision=model_revision,
            max_num_tokens=max_num_tokens,
            enable_chunked_prefill=enable_chunked_prefill,
            max_batch_size=max_batch_size,
            max_logprobs=max_logprobs,
            scheduling=scheduling,
            tensor_parallel_size=tensor_parallel_size,
        )

    @property
    def knows_chunks(self) -> bool:
        """Whether prompts may be divided where the user did not ask for it.

        Connectors written for other engines may not expect it: LMCache's saves all of a prompt with
        its first chunk.
        """
        return self.connector is None or self.connector.connector_module is None


def _check_count(field: str, value: object) -> None:
    if not isinstance(value, int):
        raise ConfigurationError(f"{field}: {value!r} must be an integer, at least 1")
    if value < 1:
        raise ConfigurationError(f"{field}: {value} must be at least 1")


def _check_bool(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{field}: {shown(value)} must be True or False")


def _check_max_logprobs(value: object) -> None:
    if not isinstance(value, int) or value < -1:
        raise ConfigurationError(
            f"max_logprobs: {shown(value)} must be at least 0, or -1: all; give an integer"
        )


def _directory(model: object) -> Path:
    if isinstance(model, (str, os.PathLike)):
        return model_directory(model if isinstance(model, str) else Path(model))
    raise ConfigurationError(
        f"model: {shown(model)} is a {type(model).__name__}; give the directory of a model"
    )


def _name(given: object) -> str:
    """Of a dtype or a device; torch's own objects will do."""
    return str(given).removeprefix("torch.")


def _manager_factory(given: object) -> KVCacheManagerFactory:
    if given is None:
        from kvconnect.cache.kv_cache_manager import KVCacheManager

        return KVCacheManager
    if not callable(given):
        raise ConfigurationError(
            f"kv_cache_manager: {shown(given)} is a {type(given).__name__}; give a callable that "
            "makes a cache manager"
        )
    return given
