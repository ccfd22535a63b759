"""The class `LLM`: a model with a KV cache and, optionally, a store."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from kvconnect.cache.pool.events import KvCacheEvent
from kvconnect.config import KvCacheConnectorConfig
from kvconnect.engine.assembly import Assembly, assembled
from kvconnect.engine.at_exit import close_at_exit
from kvconnect.engine.generation import Generation
from kvconnect.engine.options import EngineOptions, takes
from kvconnect.engine.request.output import EngineStats
from kvconnect.engine.request.prompts import Prompt
from kvconnect.engine.thread import EngineThread
from kvconnect.errors import ConfigurationError
from kvconnect.events.settings import EventsConfig
from kvconnect.keys import BlockKey, Namespace, Shard, chain_key, store_key
from kvconnect.layout import KvCacheLayout
from kvconnect.request import SamplingParams
from kvconnect.shards import stored_heads
from kvconnect.tokens import as_token_array

if TYPE_CHECKING:
    from kvconnect.events.publisher import EventPublisher, EventsAddress

# Seconds for a store to close, beyond the drain.
_CLOSE_S = 1.8


class LLM(Generation):
    """A Hugging Face causal LM, served by one engine thread.

    Every method may be called from any thread. Close the engine, or use it as a context manager:
    closing aborts running requests and writes blocks that are not saved yet.

    Args:
        model: directory of the model, or its name in the local Hugging Face cache.
        options: keyword arguments, the fields of `EngineOptions`, which documents them.

    Attributes:
        options: the checked arguments.
        layouts: the layout of a KV block in each pool group: full attention first, then by window.
        tokenizer: the tokenizer of the model; ``None`` if its directory has none.

    Raises:
        ConfigurationError: a setting is wrong, the model cannot be loaded or served, the store
            cannot be opened. Nothing is left running.
        ModelChanged: a file of the model changed while it was loaded; try again.
        RankLost: the process of a rank ended meanwhile; names it.
    """

    @takes(EngineOptions)
    def __init__(self, options: EngineOptions) -> None:
        self._events = _publisher(options.events_config)
        parts = _assembled(options, self._events)
        self._model, self.tokenizer = parts.loaded.model, parts.loaded.tokenizer
        self.layouts = parts.geometry.layouts
        self.options = options
        shard = Shard(0, options.tensor_parallel_size)
        self._own = stored_heads(self.layouts, shard, parts.geometry.num_kv_heads)[0].own
        self._kv, self._scheduler, self._intake = parts.kv, parts.scheduler, parts.intake
        self._engine = parts.engine
        self._ids = itertools.count()
        self._inbox = parts.inbox
        self._thread = EngineThread(
            self._engine,
            self._inbox,
            close_s=_close_s(options.connector_config),
            after_step=None if self._events is None else self._events.ring,
        )
        # Handles hold it, too, and nothing of the engine: a closed one is freed with the `LLM`.
        self._in_use = _InUse()
        # A weak reference: an error that ended the engine refers to frames of the caller, which
        # refer to this object. A running thread keeps itself alive.
        weakref.finalize(self._in_use, _end, weakref.ref(self._thread), self._events)
        close_at_exit(self._thread)

    @property
    def layout(self) -> KvCacheLayout:
        """The layout of a KV block of group 0."""
        return self.layouts[0]

    @property
    def max_seq_len(self) -> int:
        """The length of the longest sequence, prompt and answer, that fits model and cache."""
        return self._intake.max_seq_len

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The process ids of the ranks, by rank, this process first; for monitoring and tests."""
        return self._engine.process_ids

    @property
    def events_address(self) -> EventsAddress | None:
        """The sockets that publish stored and removed blocks; ``None`` without `events`."""
        return None if self._events is None else self._events.address

    @property
    def events_problem(self) -> str | None:
        """The error for which no events are published now; ``None``: there is none."""
        return None if self._events is None else self._events.problem

    def check_health(self) -> None:
        """Checks that requests are accepted; never blocks.

        Raises:
            EngineClosed: requests are refused; ``__cause__`` is the error that ended the engine, if
                any.
        """
        self._inbox.check_open()

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary: token ids are below it."""
        return self._model.vocab_size

    def store_keys(
        self, prompt: Prompt, *, cache_salt: str | None = None, lora_id: int | str | None = None
    ) -> dict[BlockKey, int]:
        """Returns the store keys of a prompt's blocks, and how many tokens each has; never blocks.

        They are those of pool group 0 and of the first rank, in order. The last block may hold
        fewer tokens than ``tokens_per_block``, unless the model has recurrent layers. The prompt's
        last token is in no block, because it is always computed.

        Raises:
            ConfigurationError: the prompt is wrong, or longer than model or cache allow.
        """
        namespace = Namespace(cache_salt, lora_id)
        request = self._intake.request(
            -1, prompt, SamplingParams(max_tokens=0), namespace, None, None
        )
        chain, size = request.key_chain, self.layout.tokens_per_block
        keys = dict.fromkeys(chain.keys(), size)
        start, end = len(keys) * size, len(chain.tokens) - 1
        has_tail = start < end and all(one.kind != "state" for one in self.layouts)
        if has_tail:
            parent = next(reversed(keys), chain.root)
            keys[chain_key(parent, as_token_array(chain.tokens[start:end]))] = end - start
        return {store_key(key, 0, self._own): num for key, num in keys.items()}

    def reset_prefix_cache(self) -> bool:
        """Drops the cached blocks of device and host; the store keeps its blocks.

        Events that are kept for replay are dropped as well, in any case: they hold token ids.
        Blocks for a step, and at most 1 s more for the publisher of events.

        Returns:
            True if all were dropped. False if requests or saves hold blocks; then none was dropped.

        Raises:
            EngineClosed: the engine accepts no more requests.
        """
        dropped = self._thread.reset_cache()
        if self._events is not None:
            self._events.forget()
        return dropped

    def take_events(self) -> list[KvCacheEvent]:
        """Returns the changes of the KV cache since the last call, oldest first; never blocks.

        The newest ``KvCacheConfig.event_buffer_max_size`` are kept: by default none. A gap in their
        ``event_id`` shows that events were dropped. With `events` the publisher receives them, and
        this returns an empty list.
        """
        return self._kv.take_events() if self._events is None else []

    def stats(self) -> EngineStats:
        """Returns the counts since the start, and the present numbers of requests and blocks."""
        scheduler = self._scheduler
        return replace(
            self._engine.stats,
            waiting_requests=len(scheduler.waiting),
            running_requests=len(scheduler.running),
            loading_requests=len(scheduler.loading),
            saving_requests=len(scheduler.saving),
        )

    def close(self) -> None:
        """Aborts running requests, drains the store, ends the thread; blocks meanwhile. Idempotent.

        With a connector it returns within ``save_timeout_s`` + 2 s, whatever the connector does;
        with `events` within 1 s more.
        """
        self._thread.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _InUse:
    """An object that an `LLM` and its handles hold. When it is freed, the engine ends."""


def _publisher(config: EventsConfig | None) -> EventPublisher | None:
    """Returns the publisher, which listens already, so that a port in use is reported early."""
    if config is None:
        return None
    try:
        from kvconnect.events.publisher import EventPublisher
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"events: need '{error.name}'; pip install 'kvconnect[events]'"
        ) from error
    return EventPublisher(config)


def _assembled(options: EngineOptions, events: EventPublisher | None) -> Assembly:
    """Returns the parts of the engine; `events` publishes the events of its cache."""
    try:
        parts = assembled(options)
    except BaseException:
        if events is not None:
            events.close()
        raise
    if events is not None:
        events.start(parts.kv.take_events, parts.geometry.layouts)
    return parts


def _end(thread: weakref.ref[EngineThread], events: EventPublisher | None) -> None:
    if (running := thread()) is not None:
        running.close(wait=False)
    if events is not None:
        events.close()


def _close_s(config: KvCacheConnectorConfig | None) -> float | None:
    return None if config is None else config.save_timeout_s + _CLOSE_S
