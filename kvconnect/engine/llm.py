"""`LLM`: a model with a KV cache and, if wanted, a store behind it."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from kvconnect.cache.pool.events import KvCacheEvent
from kvconnect.cache.resource_manager import BaseKVCacheManager, KVCacheManagerFactory
from kvconnect.config import KvCacheConfig, KvCacheConnectorConfig
from kvconnect.connector.data import LlmArgs
from kvconnect.connector.offload.store import stored_as
from kvconnect.connector.runtime.manager import KvCacheConnectorManager
from kvconnect.engine.at_exit import close_at_exit
from kvconnect.engine.attachment import Attachment, Connector, NoConnector, config_of
from kvconnect.engine.checkpoint.hub_cache import model_directory
from kvconnect.engine.checkpoint.loading import load_model
from kvconnect.engine.drafts import NgramSpeculation, Speculation
from kvconnect.engine.engine import Engine
from kvconnect.engine.generation import Generation
from kvconnect.engine.inbox import Inbox
from kvconnect.engine.keywords import known_keywords
from kvconnect.engine.model.model import Model, check_sharing
from kvconnect.engine.model.pool_groups import CacheGeometry
from kvconnect.engine.ranks.leader import Leader, start_followers
from kvconnect.engine.ranks.settings import (
    RankSettings,
    check_tensor_parallel_size,
    rank_device,
)
from kvconnect.engine.request.intake import Intake
from kvconnect.engine.request.output import EngineStats
from kvconnect.engine.scheduler import Scheduler, SchedulingPolicy
from kvconnect.engine.thread import EngineThread
from kvconnect.errors import ConfigurationError
from kvconnect.keys import Shard
from kvconnect.layout import KvCacheLayout
from kvconnect.text import shown

__all__ = ["LLM"]

# Beyond a drain, for a store to close.
_CLOSE_S = 1.8


class LLM(Generation):
    """A Hugging Face causal LM, served by one engine thread.

    Every method may be called from any thread. Close it, or use it as a context manager: closing
    aborts what runs and drains what the store has not taken yet.

    Args:
        model: directory of the model, or its name in the local Hugging Face cache, ``org/name``;
            nothing is ever downloaded.
        kv_cache: the KV cache on the device: a configuration, or its fields as a dict.
        connector: where KV blocks are kept beyond it: a store URL, a store, or a configuration (or
            its fields as a dict).
        kv_cache_manager: makes a cache manager of your own instead of `KVCacheManager`.
        dtype: of weights and KV: ``auto``, ``float64``, ``float32``, ``float16``, ``bfloat16``.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:N``.
        model_revision: names the weights, for example ``org/name@commit``, so that they need not be
            digested. The caller promises that no other weights ever go by this name among all
            engines of a store: these would answer with each other's KV.
        max_num_tokens: tokens that one step computes at most; longer prompts come in chunks.
        enable_chunked_prefill: False: no prompt is divided, one of more than `max_num_tokens` is
            refused. (A request that was preempted and has generated more than that is divided.)
        max_batch_size: requests that run at once.
        scheduling: ``guaranteed_no_evict`` starts a request only if all that run can get to their
            end; ``max_utilization`` starts it when its prompt fits, and preempts the last started
            when blocks run out (what it computed stays in the cache as long as there is room).
        max_logprobs: the most log probabilities that a request may ask for per token; -1: all.
        tensor_parallel_size: ranks that each compute a part of every layer and keep their share of
            the KV heads, in processes of their own: this one, and others that it starts and that
            end with it. On GPUs each has one, on the CPU they share the cores. Under ``torchrun``
            every process runs the same script: in all but the first this follows the first one,
            until that closes its engine, and then ends the process (`SystemExit`). A process has
            one engine of several ranks at a time. For models with a tensor-parallel plan in
            transformers, the built-in cache manager, and stores that are given by a URL.
        speculative: ``ngram``, or an `NgramSpeculation`: greedy requests verify several tokens per
            step that followed the same words before; the output is the same.

    Attributes:
        layouts: of a KV block, one of each pool group: full attention first, then by window.
        tokenizer: of the model; ``None`` if its directory has none.

    Raises:
        ConfigurationError: a setting is wrong, the model cannot be loaded or served, the store
            cannot be opened. Nothing is left running.
        ModelChanged: a file of the model changed while it was loaded; try again.
        RankLost: the process of a rank ended meanwhile; names it.
    """

    @known_keywords
    def __init__(
        self,
        model: str | Path,
        *,
        kv_cache: KvCacheConfig | Mapping[str, object] | None = None,
        connector: Connector | None = None,
        kv_cache_manager: KVCacheManagerFactory | None = None,
        dtype: str = "auto",
        device: str = "auto",
        model_revision: str | None = None,
        max_num_tokens: int = 2048,
        enable_chunked_prefill: bool = True,
        max_batch_size: int = 64,
        max_logprobs: int = 20,
        scheduling: SchedulingPolicy = "guaranteed_no_evict",
        speculative: Speculation | None = None,
        tensor_parallel_size: int = 1,
    ) -> None:
        _check_count("max_num_tokens", max_num_tokens)
        _check_count("max_batch_size", max_batch_size)
        _check_max_logprobs(max_logprobs)
        _check_bool("enable_chunked_prefill", enable_chunked_prefill)
        config = KvCacheConfig() if kv_cache is None else KvCacheConfig.given("kv_cache", kv_cache)
        connector_config = config_of(connector)
        drafts = NgramSpeculation.of(speculative)
        factory = _manager_factory(kv_cache_manager)
        check_tensor_parallel_size(tensor_parallel_size, kv_cache_manager)
        directory = _directory(model)
        leader = _leader(
            tensor_parallel_size, directory, dtype, device, model_revision, config, connector_config
        )
        try:
            loaded = load_model(
                directory,
                dtype=_name(dtype),
                device=rank_device(_name(device), 0, tensor_parallel_size),
                revision=model_revision,
                ranks=None if leader is None else leader.ranks,
            )
            self._model, self.tokenizer = loaded.model, loaded.tokenizer
            _check_dtype(config, self._model)
            geometry = CacheGeometry.of(
                self._model, config, window_pools=getattr(factory, "supports_window_pools", False)
            )
            self.layouts = geometry.layouts
            digest = stored_as(geometry.digest(loaded.digest), connector_config)
            if leader is not None:
                config, factory = leader.meet(loaded), leader.cache_factory
            self._kv = kv = factory(config, self.layouts, self._model.device)
            layers = geometry.cached_layers(kv, self._model.dtype)
            self._scheduler = Scheduler(
                kv,
                max_num_tokens=max_num_tokens,
                max_batch_size=max_batch_size,
                policy=scheduling,
                speculation=drafts,
                share_prefixes=_knows_chunks(connector_config),
                divide_prompts=enable_chunked_prefill,
            )
            inbox: Inbox[Any] = Inbox()
            self._intake = Intake(
                self._model,
                self.tokenizer,
                geometry.whole_layouts,
                digest,
                kv.get_max_resource_count(),
                max_logprobs=max_logprobs,
                max_prompt=None if enable_chunked_prefill else max_num_tokens,
            )
            shard = Shard(0, tensor_parallel_size)
            args = _args(directory, config, connector_config, geometry, digest, shard)
            attachment = _attached(args, kv, inbox.ring, leader)
        except BaseException:
            if leader is not None:
                leader.close(failed=True)
            raise
        self._engine = Engine(self._model, kv, attachment, self._scheduler, layers, leader)
        self._ids = itertools.count()
        self._thread = EngineThread(self._engine, inbox, close_s=_close_s(connector_config))
        weakref.finalize(self, self._thread.close, wait=False)
        close_at_exit(self)

    @property
    def layout(self) -> KvCacheLayout:
        """Of a KV block of group 0."""
        return self.layouts[0]

    @property
    def max_seq_len(self) -> int:
        """Tokens of the longest sequence, prompt and answer, that model and cache have room for."""
        return self._intake.max_seq_len

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of the ranks' processes, by rank: this one first. For watching them, and for tests."""
        return self._engine.process_ids

    def check_health(self) -> None:
        """Nothing, as long as requests are taken in; never blocks.

        Raises:
            EngineClosed: they are not; ``__cause__`` is the error that ended the engine, if any.
        """
        self._thread.check_open()

    def take_events(self) -> list[KvCacheEvent]:
        """What changed in the KV cache since the last call, oldest first; never blocks.

        Kept are the newest ``KvCacheConfig.event_buffer_max_size``: by default none. A gap in their
        ``event_id`` tells that some were not taken in time.
        """
        return self._kv.take_events()

    def stats(self) -> EngineStats:
        """Counts so far, and what the engine holds now."""
        scheduler = self._scheduler
        return replace(
            self._engine.stats,
            waiting_requests=len(scheduler.waiting),
            running_requests=len(scheduler.running),
            loading_requests=len(scheduler.loading),
            saving_requests=len(scheduler.saving),
        )

    def close(self) -> None:
        """Abort what runs, drain the store, end the thread; blocks until then. Idempotent.

        With a connector it takes at most its ``save_timeout_s`` and 2 s, whatever that does.
        """
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _leader(
    size: int,
    directory: Path,
    dtype: object,
    device: object,
    revision: str | None,
    config: KvCacheConfig,
    connector: KvCacheConnectorConfig | None,
) -> Leader | None:
    """Starts the other ranks; ``None``: there are none. See `start_followers`."""
    if size == 1:
        return None
    kind = rank_device(_name(device), 0, size).partition(":")[0]
    check_sharing(directory, size)
    return start_followers(
        RankSettings(size, directory, _name(dtype), kind, revision, config, connector)
    )


def _knows_chunks(connector: KvCacheConnectorConfig | None) -> bool:
    # Those written for other engines may not (LMCache's saves all of a prompt with its first):
    # nothing but the user's budget divides prompts there.
    return connector is None or connector.connector_module is None


def _args(
    directory: Path,
    config: KvCacheConfig,
    connector: KvCacheConnectorConfig | None,
    geometry: CacheGeometry,
    digest: bytes,
    shard: Shard,
) -> LlmArgs | None:
    """What the connector is made with; ``None``: there is none."""
    if connector is None:
        return None
    return LlmArgs(
        str(directory),
        config,
        connector,
        layouts=geometry.layouts,
        model_digest=digest,
        shard=shard,
        num_kv_heads=geometry.num_kv_heads,
    )


def _attached(
    args: LlmArgs | None,
    kv: BaseKVCacheManager,
    wakeup: Callable[[], None],
    leader: Leader | None,
) -> Attachment:
    """The connector of `args`, on every rank."""
    if leader is None:
        return NoConnector() if args is None else KvCacheConnectorManager(args, kv, wakeup=wakeup)
    leader.set_up(kv)
    manager = None
    if args is not None:
        manager = KvCacheConnectorManager(args, kv, wakeup=wakeup, communicator=leader.communicator)
    try:
        attached = leader.attached(manager, kv)
    except BaseException:
        if manager is not None:
            manager.shutdown()
        raise
    leader.on_lost(wakeup)
    return attached or NoConnector()


def _close_s(config: KvCacheConnectorConfig | None) -> float | None:
    return None if config is None else config.save_timeout_s + _CLOSE_S


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


def _check_dtype(config: KvCacheConfig, model: Model) -> None:
    if config.dtype not in {"auto", "fp8", str(model.dtype).removeprefix("torch.")}:
        raise ConfigurationError(
            f"kv_cache.dtype: '{config.dtype}' differs from the model's {model.dtype}; "
            "use auto, or fp8"
        )


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
