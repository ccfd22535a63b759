"""The arguments of `LLM`: the one place that lists, explains and checks them.

Its decorators make a constructor take the fields of a record, and refuse unknown arguments.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from kvconnect.cache.resource_manager import KVCacheManagerFactory
from kvconnect.config import DEFAULT_SCHEDULING, KvCacheConfig, KvCacheConnectorConfig
from kvconnect.connector.io.identity import check_store
from kvconnect.engine.attachment import Connector, config_of
from kvconnect.engine.checkpoint.hub_cache import model_directory
from kvconnect.engine.ranks.settings import check_tensor_parallel_size
from kvconnect.engine.sampling.drafts import NgramSpeculation, Speculation
from kvconnect.engine.scheduler import SchedulingPolicy
from kvconnect.errors import ConfigurationError, nearest
from kvconnect.events.settings import Events, EventsConfig
from kvconnect.text import shown


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The arguments of `LLM`, checked. Nothing is loaded or started by it.

    Args:
        model: directory of the model, or its name in the local Hugging Face cache, ``org/name``;
            nothing is ever downloaded.
        kv_cache: the KV cache on the device: a configuration, or its fields as a dict.
        connector: the store of KV blocks: a store URL, a store object, or a configuration (or its
            fields as a dict).
        kv_cache_manager: a function that makes a cache manager of your own instead of
            `KVCacheManager`.
        dtype: the dtype of weights and KV: ``auto``, ``float64``, ``float32``, ``float16``,
            ``bfloat16``.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:N``.
        model_revision: a name for the weights, for example ``org/name@commit``, which replaces
            their digest. The caller guarantees that no engine of the store uses this name for other
            weights. Otherwise engines would load each other's KV and generate wrong tokens.
        max_num_tokens: the most tokens that one step computes; longer prompts are computed in
            chunks.
        enable_chunked_prefill: if False, no prompt is divided, and one of more than
            `max_num_tokens` is refused. (A request that was preempted and has generated more than
            that is divided.)
        max_batch_size: the most requests that run at once.
        max_logprobs: the most log probabilities per token that a request may have; -1: all.
        scheduling: ``guaranteed_no_evict`` starts a request only if all running ones can finish;
            ``max_utilization`` starts it when its prompt fits, and preempts the last started one
            when blocks run out (its computed blocks stay cached until others need the memory).
        speculative: ``ngram``, or an `NgramSpeculation`. Greedy requests then verify several
            proposed tokens per step: those that followed the same tokens before. The output is the
            same.
        tensor_parallel_size: ranks that each compute a part of every layer and keep their share of
            the KV heads, in processes of their own: this one, and others that it starts and that
            end with it. On GPUs each has one, on the CPU they share the cores. Under ``torchrun``
            every process runs the same script. In all processes but the first, the constructor
            follows the first process until that closes its engine, and then raises `SystemExit`. A
            process has one engine of several ranks at a time. It requires a model with a
            tensor-parallel plan in transformers, the built-in cache manager, and a store given by a
            URL.

        events: the ZeroMQ endpoint that publishes stored and removed blocks in vLLM's format, or an
            `EventsConfig` (or its fields as a dict). Needs the extra ``events``.

    Attributes:
        directory: the directory of the model.
        cache_config: the checked form of `kv_cache`.
        connector_config: the checked form of `connector`; ``None``: there is none.
        cache_factory: the function that makes the cache manager.
        events_config: the checked form of `events`; ``None``: nothing is published.
        speculation: the checked form of `speculative`; ``None``: none.

    Raises:
        ConfigurationError: an argument is wrong; names it, its value and what is right.
    """

    model: str | Path
    _: KW_ONLY
    kv_cache: KvCacheConfig | Mapping[str, object] | None = None
    connector: Connector | None = field(default=None, repr=False)
    kv_cache_manager: KVCacheManagerFactory | None = None
    dtype: str = "auto"
    device: str = "auto"
    model_revision: str | None = None
    max_num_tokens: int = 2048
    enable_chunked_prefill: bool = True
    max_batch_size: int = 64
    max_logprobs: int = 20
    scheduling: SchedulingPolicy = DEFAULT_SCHEDULING
    speculative: Speculation | None = None
    tensor_parallel_size: int = 1
    events: Events | None = None

    directory: Path = field(init=False)
    cache_config: KvCacheConfig = field(init=False)
    connector_config: KvCacheConnectorConfig | None = field(init=False)
    cache_factory: KVCacheManagerFactory = field(init=False)
    events_config: EventsConfig | None = field(init=False)
    speculation: NgramSpeculation | None = field(init=False)

    def __post_init__(self) -> None:
        _check_count("max_num_tokens", self.max_num_tokens)
        _check_count("max_batch_size", self.max_batch_size)
        _check_max_logprobs(self.max_logprobs)
        _check_bool("enable_chunked_prefill", self.enable_chunked_prefill)
        check_tensor_parallel_size(self.tensor_parallel_size, self.kv_cache_manager)
        config = config_of(self.connector)
        if config is not None:
            check_store(config)
        given = {} if self.kv_cache is None else self.kv_cache
        cache, events = KvCacheConfig.given("kv_cache", given), EventsConfig.of(self.events)
        if events is not None:
            cache = cache.model_copy(update={"event_buffer_max_size": events.max_queued})
        parsed = {
            "connector_config": config,
            "cache_config": cache,
            "events_config": events,
            "speculation": NgramSpeculation.of(self.speculative),
            "cache_factory": _manager_factory(self.kv_cache_manager),
            "directory": _directory(self.model),
            "dtype": _name(self.dtype),
            "device": _name(self.device),
        }
        for name, value in parsed.items():
            object.__setattr__(self, name, value)

    @property
    def knows_chunks(self) -> bool:
        """Returns the connector's default of `enable_chunked_prefill`: whether it supports chunks.

        Connectors written for other engines may not: LMCache's saves all of a prompt with the first
        chunk.
        """
        config = self.connector_config
        return config is None or config.uses_pair


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
    """Returns the name of a dtype or a device; accepts torch's own objects."""
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


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


def known_keywords(method: Callable[P, R]) -> Callable[P, R]:
    """Makes `method` refuse unknown keyword arguments with an error that names the nearest one.

    The method then raises `ConfigurationError` where Python raises ``TypeError``.
    """
    known = [name for name in inspect.signature(method).parameters if name != "self"]
    expected = frozenset(known)

    @wraps(method)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs.keys() - expected:
            raise ConfigurationError(
                f"{type(args[0]).__name__}.{method.__name__}: unknown argument '{name}'; "
                f"{nearest(name, known)}"
            )
        return method(*args, **kwargs)

    return checked


def takes(
    record: Callable[P, R],
) -> Callable[[Callable[[S, R], None]], Callable[Concatenate[S, P], None]]:
    """Decorates a constructor with one argument `record`: it accepts the record's arguments.

    So they are listed once, for readers, type checkers and `help` alike. Unknown ones are refused
    as by `known_keywords`.
    """

    def decorate(init: Callable[[S, R], None]) -> Callable[Concatenate[S, P], None]:
        @wraps(init)
        def taking(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
            init(self, record(*args, **kwargs))

        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        parameters = inspect.signature(record).parameters.values()
        vars(taking)["__signature__"] = inspect.Signature([itself, *parameters])
        return known_keywords(taking)

    return decorate
