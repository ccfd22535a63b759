"""`LLM`: a model with a KV cache and, if wanted, a store behind it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeAlias

from kvconnect.backend import Backend
from kvconnect.cache.resource_manager import BaseKVCacheManager, KVCacheManagerFactory
from kvconnect.config import KvCacheConfig, KvCacheConnectorConfig, KvCacheRetentionConfig
from kvconnect.connector.data import LlmArgs
from kvconnect.connector.offload.store import stored_as
from kvconnect.connector.runtime.manager import KvCacheConnectorManager
from kvconnect.digest import model_digest
from kvconnect.engine.at_exit import close_at_exit
from kvconnect.engine.attachment import Attachment, NoConnector
from kvconnect.engine.drafts import NgramDrafter, NgramSpeculation, Speculation
from kvconnect.engine.engine import Engine
from kvconnect.engine.inbox import Inbox
from kvconnect.engine.model.model import Model
from kvconnect.engine.model.pool_groups import CacheGeometry
from kvconnect.engine.request.handle import RequestHandle
from kvconnect.engine.request.intake import Intake
from kvconnect.engine.request.live_request import LiveRequest
from kvconnect.engine.request.output import EngineStats, RequestOutput, StreamChunk
from kvconnect.engine.request.prompts import Prompt, as_prompts, one_each
from kvconnect.engine.request.stops import StopChecker
from kvconnect.engine.request.tokenizer import Tokenizer
from kvconnect.engine.scheduler import Scheduler, SchedulingPolicy
from kvconnect.engine.thread import EngineThread
from kvconnect.errors import ConfigurationError
from kvconnect.keys import Namespace
from kvconnect.layout import KvCacheLayout
from kvconnect.request import SamplingParams

__all__ = ["LLM"]

Connector: TypeAlias = KvCacheConnectorConfig | Backend | str


class LLM:
    """A Hugging Face causal LM directory, served by one engine thread.

    Every method may be called from any thread. Close it, or use it as a context manager: closing
    aborts what runs and drains what the store has not taken yet.

    Args:
        model: directory of the model.
        kv_cache: the KV cache on the device.
        connector: where KV blocks are kept beyond it: a store URL, a store, or a configuration.
        kv_cache_manager: makes a cache manager of your own instead of `KVCacheManager`.
        dtype: of weights and KV: ``auto``, ``float64``, ``float32``, ``float16``, ``bfloat16``.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:N``.
        max_num_tokens: tokens that one step computes at most; longer prompts come in chunks.
        max_batch_size: requests that run at once.
        scheduling: ``guaranteed_no_evict`` starts a request only if all that run can get to their
            end; ``max_utilization`` starts it when its prompt fits, and preempts the last started
            when blocks run out (what it computed stays in the cache as long as there is room).
        speculative: ``ngram``, or an `NgramSpeculation`: greedy requests verify several tokens per
            step that followed the same words before; the output is the same.

    Attributes:
        layouts: of a KV block, one of each pool group: full attention first, then by window.
        tokenizer: of the model; ``None`` if its directory has none.

    Raises:
        ConfigurationError: a setting is wrong, the model cannot be loaded or served, the store
            cannot be opened. Nothing is left running.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        kv_cache: KvCacheConfig | None = None,
        connector: Connector | None = None,
        kv_cache_manager: KVCacheManagerFactory | None = None,
        dtype: str = "auto",
        device: str = "auto",
        max_num_tokens: int = 2048,
        max_batch_size: int = 64,
        scheduling: SchedulingPolicy = "guaranteed_no_evict",
        speculative: Speculation | None = None,
    ) -> None:
        for name, value in (("max_num_tokens", max_num_tokens), ("max_batch_size", max_batch_size)):
            if value < 1:
                raise ConfigurationError(f"{name}: {value} must be at least 1")
        config = kv_cache or KvCacheConfig()
        drafts = NgramSpeculation.of(speculative)
        directory = Path(model)
        self._model = Model(directory, dtype=dtype, device=device)
        _check_dtype(config, self._model)
        factory = kv_cache_manager or _default_manager()
        geometry = CacheGeometry.of(
            self._model, config, window_pools=getattr(factory, "supports_window_pools", False)
        )
        self.layouts = geometry.layouts
        connector_config = _connector_config(connector)
        digest = stored_as(geometry.digest(model_digest(directory)), connector_config)
        self.tokenizer = Tokenizer.of(directory)
        kv = factory(config, self.layouts, self._model.device)
        layers = geometry.cached_layers(kv, self._model.dtype)
        self._scheduler = Scheduler(
            kv,
            max_num_tokens=max_num_tokens,
            max_batch_size=max_batch_size,
            policy=scheduling,
            drafter=None if drafts is None else _drafter(drafts, kv),
        )
        inbox: Inbox[Any] = Inbox()
        self._intake = Intake(
            self._model, self.tokenizer, self.layouts, digest, kv.get_max_resource_count()
        )
        attachment = _attach(connector_config, config, directory, self.layouts, digest, kv, inbox)
        self._engine = Engine(self._model, kv, attachment, self._scheduler, layers)
        self._ids = itertools.count()
        self._thread = EngineThread(self._engine, inbox)
        weakref.finalize(self, self._thread.close, wait=False)
        close_at_exit(self)

    @property
    def layout(self) -> KvCacheLayout:
        """Of a KV block of group 0."""
        return self.layouts[0]

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | Sequence[str | None] | None = None,
        lora_id: int | str | None = None,
        extra_key: str | int | None = None,
        retention: KvCacheRetentionConfig | Sequence[KvCacheRetentionConfig | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer `prompts`, texts or token ids, all at once; blocks until the last one ended.

        Args:
            prompts: one or several; one is answered by a list of one.
            sampling_params: one for all, or one each.
            cache_salt: requests share cached blocks only if theirs is equal; one for all, or a
                list of one each.
            lora_id: the same for adapters.
            extra_key: the same for anything else.
            retention: which blocks are worth keeping; one for all, or a list of one each.

        Raises:
            ConfigurationError: a prompt or a setting is wrong; nothing was started.
            EngineClosed: the engine takes no more requests.
            BaseException: what stopped the engine, or interrupted the wait (Ctrl-C); these requests
                are aborted.
        """
        several = as_prompts(prompts)
        count = len(several)
        params = one_each("sampling_params", sampling_params or SamplingParams(), count)
        salts: list[str | None] = one_each("cache_salt", cache_salt, count)
        kept = one_each("retention", retention, count)
        made = [
            self._make(prompt, one, Namespace(salt, lora_id, extra_key), keep, None)
            for prompt, one, salt, keep in zip(several, params, salts, kept, strict=True)
        ]
        handles: list[RequestHandle] = []
        try:
            for live in made:
                handles.append(self._post(live))  # noqa: PERF401  what was posted is to be aborted
            return [handle.result() for handle in handles]
        except BaseException:
            for handle in handles:
                handle.abort()
            raise

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        lora_id: int | str | None = None,
        extra_key: str | int | None = None,
        retention: KvCacheRetentionConfig | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> RequestHandle:
        """Start one request and return at once; see `generate`.

        Args:
            prompt: text or token ids.
            sampling_params: how to go on from it.
            cache_salt: as in `generate`.
            lora_id: as in `generate`.
            extra_key: as in `generate`.
            retention: as in `generate`.
            kv_transfer_params: data for the connector that travels with the request.

        Raises:
            ConfigurationError: the prompt or a setting is wrong.
            EngineClosed: the engine takes no more requests.
        """
        namespace = Namespace(cache_salt, lora_id, extra_key)
        params = sampling_params or SamplingParams()
        return self._post(self._make(prompt, params, namespace, retention, kv_transfer_params))

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        lora_id: int | str | None = None,
        extra_key: str | int | None = None,
        retention: KvCacheRetentionConfig | None = None,
    ) -> Iterator[StreamChunk]:
        """Start one request and iterate over what comes out; see `generate`.

        Starts at once, not with the first ``next``. Leaving the iteration early aborts the request.
        """
        handle = self.submit(
            prompt,
            sampling_params,
            cache_salt=cache_salt,
            lora_id=lora_id,
            extra_key=extra_key,
            retention=retention,
        )
        chunks = _abort_when_left(handle)
        next(chunks)
        return chunks

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
        """Abort what runs, drain the store, end the thread; blocks until then. Idempotent."""
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(
        self,
        prompt: Prompt,
        params: SamplingParams,
        namespace: Namespace,
        retention: KvCacheRetentionConfig | None,
        kv_transfer_params: dict[str, Any] | None,
    ) -> LiveRequest:
        request = self._intake.request(
            next(self._ids), prompt, params, namespace, retention, kv_transfer_params
        )
        stops = StopChecker(params, self._model.eos_token_ids, self.tokenizer)
        return LiveRequest(request, stops)

    def _post(self, live: LiveRequest) -> RequestHandle:
        self._thread.post(live)
        return RequestHandle(live, self._abort)

    def _abort(self, request_id: int) -> None:
        self._thread.abort(request_id)


def _check_dtype(config: KvCacheConfig, model: Model) -> None:
    if config.dtype not in {"auto", "fp8", str(model.dtype).removeprefix("torch.")}:
        raise ConfigurationError(
            f"kv_cache.dtype: '{config.dtype}' differs from the model's {model.dtype}; "
            "use auto, or fp8"
        )


def _default_manager() -> KVCacheManagerFactory:
    from kvconnect.cache.kv_cache_manager import KVCacheManager

    return KVCacheManager


def _drafter(settings: NgramSpeculation, kv: BaseKVCacheManager) -> NgramDrafter:
    if not kv.supports_connector:
        raise ConfigurationError(
            f"speculative: rejected drafts are rewound, which {type(kv).__name__} does not say it "
            "can (supports_connector is False)"
        )
    return NgramDrafter(settings)


def _connector_config(connector: Connector | None) -> KvCacheConnectorConfig | None:
    if isinstance(connector, str):
        return KvCacheConnectorConfig(url=connector)
    if isinstance(connector, Backend):
        return KvCacheConnectorConfig(backend=connector)
    return connector


def _attach(
    connector: KvCacheConnectorConfig | None,
    kv_config: KvCacheConfig,
    directory: Path,
    layouts: tuple[KvCacheLayout, ...],
    digest: bytes,
    kv: BaseKVCacheManager,
    inbox: Inbox[Any],
) -> Attachment:
    if connector is None:
        return NoConnector()
    args = LlmArgs(
        model=str(directory),
        kv_cache_config=kv_config,
        kv_connector_config=connector,
        layouts=layouts,
        model_digest=digest,
    )
    return KvCacheConnectorManager(args, kv, wakeup=inbox.ring)


def _abort_when_left(handle: RequestHandle) -> Iterator[StreamChunk]:
    try:
        # A generator that was never started runs no `finally`: the caller takes this one.
        yield StreamChunk(handle.request_id, (), "", None)
        yield from handle.stream()
    finally:
        handle.abort()
