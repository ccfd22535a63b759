"""`LLM`: a model with a KV cache and, if wanted, a store behind it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Self

from kvconnect.cache.pool.events import KvCacheEvent
from kvconnect.cache.resource_manager import KVCacheManagerFactory
from kvconnect.config import KvCacheConfig, KvCacheConnectorConfig
from kvconnect.engine.assembly import assembled
from kvconnect.engine.at_exit import close_at_exit
from kvconnect.engine.attachment import Connector
from kvconnect.engine.generation import Generation
from kvconnect.engine.keywords import known_keywords
from kvconnect.engine.options import EngineOptions
from kvconnect.engine.request.output import EngineStats
from kvconnect.engine.sampling.drafts import Speculation
from kvconnect.engine.scheduler import SchedulingPolicy
from kvconnect.engine.thread import EngineThread
from kvconnect.layout import KvCacheLayout

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
        options = EngineOptions.checked(
            model,
            kv_cache=kv_cache,
            connector=connector,
            kv_cache_manager=kv_cache_manager,
            dtype=dtype,
            device=device,
            model_revision=model_revision,
            max_num_tokens=max_num_tokens,
            enable_chunked_prefill=enable_chunked_prefill,
            max_batch_size=max_batch_size,
            max_logprobs=max_logprobs,
            scheduling=scheduling,
            speculative=speculative,
            tensor_parallel_size=tensor_parallel_size,
        )
        parts = assembled(options)
        self._model, self.tokenizer = parts.loaded.model, parts.loaded.tokenizer
        self.layouts = parts.geometry.layouts
        self._kv, self._scheduler, self._intake = parts.kv, parts.scheduler, parts.intake
        self._engine = parts.engine
        self._ids = itertools.count()
        self._thread = EngineThread(self._engine, parts.inbox, close_s=_close_s(options.connector))
        # Weakly: an error that ended the engine refers to the frames it was raised in, some of them
        # the caller's, which refer to this object. A thread that runs is held by itself.
        weakref.finalize(self, _end, weakref.ref(self._thread))
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

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._model.vocab_size

    def reset_prefix_cache(self) -> bool:
        """Drops what the device and the host have cached; the store keeps what it has.

        Blocks for a step.

        Returns:
            False: a request holds blocks, or they are being saved; nothing was dropped.

        Raises:
            EngineClosed: the engine takes no more requests.
        """
        return self._thread.reset_cache()

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


def _end(thread: weakref.ref[EngineThread]) -> None:
    if (running := thread()) is not None:
        running.close(wait=False)


def _close_s(config: KvCacheConnectorConfig | None) -> float | None:
    return None if config is None else config.save_timeout_s + _CLOSE_S
