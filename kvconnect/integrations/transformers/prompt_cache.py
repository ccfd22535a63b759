"""A prompt cache that loads prompts which ``model.generate()`` has computed before."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvconnect.backend import Backend
from kvconnect.config import KvCacheConfig, KvCacheConnectorConfig
from kvconnect.connector.data import LlmArgs
from kvconnect.connector.io.blocking import StoreAccess
from kvconnect.connector.io.identity import stored_as
from kvconnect.digest.doubts import Doubt, note_doubt
from kvconnect.engine.at_exit import close_at_exit
from kvconnect.engine.attachment import Connector, config_of
from kvconnect.errors import ConfigurationError, UsageError
from kvconnect.integrations.core.load_choice import LoadChoice
from kvconnect.integrations.core.requests import RequestMaker
from kvconnect.integrations.transformers.cache_effects import refuse_effects_of_cache
from kvconnect.integrations.transformers.cache_layers import empty_cache
from kvconnect.integrations.transformers.ended_caches import EndedCaches
from kvconnect.integrations.transformers.geometry import ModelGeometry
from kvconnect.integrations.transformers.guard import ModelGuard
from kvconnect.integrations.transformers.hooks import PassHooks, PassTimes
from kvconnect.integrations.transformers.identity import identify
from kvconnect.integrations.transformers.restoring import restore
from kvconnect.integrations.transformers.rows import CachedRow, PromptRow, prompt_rows
from kvconnect.integrations.transformers.saving import SavingTo
from kvconnect.integrations.transformers.snapshots import compute_until
from kvconnect.integrations.transformers.stored_cache import StoredCache
from kvconnect.integrations.transformers.structure import Change
from kvconnect.keys import check_salt
from kvconnect.text import shown
from kvconnect.trace import count, metrics, warn_once

_open: set[PromptCache] = set()
"""All that were not closed: they live until the process exits, and are closed then."""

_ENGINE = "transformers"

# No other request waits meanwhile, and what is not found is computed for seconds.
_LOOKUP_TIMEOUT_MS = 1000.0
_STATE_INTERVAL = 1024


class PromptCache:
    """A store of prompts for one model of transformers.

    ``model.generate(**inputs, past_key_values=cache.prefill(inputs))`` loads the stored part of the
    prompts and computes the rest. Computed tokens, generated ones included, are saved in the
    background once the model was checked: in the next `prefill`, in `flush` or in `close`. The
    generated tokens are the same as without the cache.

    The model is named by its present content in memory. Each check computes 16 tokens on the
    calling thread, and compares every bit with the first result. Once a check fails, nothing is
    loaded or saved any more; `StoredCache.not_cached` is the reason.

    Hooks in the model's forward pass report which tokens are computed, until the cache is closed.
    `prefill` may be called from several threads. Close the cache, or use it as a context manager:
    closing writes what is not saved yet. A normal exit does that, too.

    Args:
        model: a decoder-only model on one device, in evaluation mode.
        connector: a store's URL, a store, or a configuration (or its fields as a dict). Given as a
            URL, lookups may take 1 s.
        tokens_per_block: tokens of a stored block. Engines share blocks of one size only.
        model_revision: a name for the weights, for example ``org/name@commit``, so that they are
            not read. The caller guarantees that no engine of the store uses this name for other
            weights, adapters or hooks.
        canary_interval: seconds for which a good check lets `prefill` load. 0 by default: each
            prefill checks.
        held_bytes: memory of caches that have ended and wait for a check; beyond it they are
            dropped. By default an eighth of the device's memory.
        state_interval: tokens between snapshots of recurrent states, a multiple of
            `tokens_per_block`. By default 1,024, or one block if that is more.
        load_decisions: true to compute a prompt if its load is predicted to take longer; false to
            load all stored blocks.

    Raises:
        ConfigurationError: a setting is wrong, or the store cannot be opened. Nothing is left
            running.
        UnsupportedModel: the model keeps something else than keys and values, computes otherwise
            with a cache, or has code that needs `model_revision`; the message is the reason.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        connector: Connector,
        *,
        tokens_per_block: int = 32,
        model_revision: str | None = None,
        canary_interval: float = 0.0,
        held_bytes: int | None = None,
        state_interval: int | None = None,
        load_decisions: bool = False,
    ) -> None:
        if not isinstance(model, PreTrainedModel):
            raise ConfigurationError(
                f"model: {shown(model)} is a {type(model).__name__}; give a model of transformers, "
                "as AutoModelForCausalLM.from_pretrained returns it, not wrapped"
            )
        config = _store_config(connector)
        cache_config = KvCacheConfig(tokens_per_block=tokens_per_block)
        identity = identify(model, model_revision)
        if identity.own and config.namespace is not None:
            warn_once(
                f"transformers.own {identity.own}",
                f"PromptCache: {identity.own}; engines that read the directory share no blocks "
                f"with it, whatever their namespace",
            )
        interval = _state_interval(state_interval, tokens_per_block)
        geometry = ModelGeometry.of(model, tokens_per_block)
        guard = ModelGuard(model, geometry.device, interval_s=canary_interval)
        if guard.doubt is None:
            has_windows = any(layout.window is not None for layout in geometry.attention)
            refuse_effects_of_cache(model, has_windows=has_windows)
        digest = stored_as(identity.digest, config, engine=_ENGINE)
        self._model = model
        self._guard = guard
        self._config = config
        self._geometry = geometry
        args = LlmArgs(
            str(model.name_or_path), cache_config, config, geometry.layouts, model_digest=digest
        )
        self._maker = RequestMaker(args, None)
        self._store = StoreAccess(args, geometry.device)
        held = _held_nbytes(geometry.device) if held_bytes is None else held_bytes
        ended: EndedCaches[StoredCache] = EndedCaches(held)
        self._saving = SavingTo(self._store, geometry, ended, guard, interval)
        self._lock = threading.Lock()  # guards the two below, which several threads change
        self._live: weakref.WeakSet[StoredCache] = weakref.WeakSet()
        self._closed = False
        self._choice = LoadChoice(
            tokens_per_block=tokens_per_block, max_tokens=sys.maxsize, decides=load_decisions
        )
        self._hooks = PassHooks(model, self._live, PassTimes(self._choice, geometry.device))
        metrics.engine = _ENGINE
        _open.add(self)
        close_at_exit(self)

    @property
    def guard(self) -> ModelGuard:
        """The guard that decides whether the model may still be cached."""
        return self._guard

    def prefill(
        self, inputs: Mapping[str, object] | Tensor, *, cache_salt: str | None = None
    ) -> StoredCache:
        """Returns a cache with the stored part of `inputs`, for one call of ``generate()``.

        Checks the model, which computes 16 tokens. Blocks up to ``lookup_timeout_ms`` for the
        lookup and ``load_timeout_s`` for the load. Blocks up to ``lookup_timeout_ms`` more while a
        prompt that begins alike is saved. A fault of the store costs time, nothing else. At least
        the last token is left to compute, or all tokens if computing them is predicted to be
        faster.

        A model with recurrent layers computes the prompt up to its last whole block here, as its
        states can be saved only where a pass ends. At least the last two tokens are left.

        Args:
            inputs: the arguments of ``generate()``: ``input_ids`` ``[batch, tokens]``, padded on
                the left, and ``attention_mask``; or just the ids. A batch with other inputs
                (pictures, embeddings) is not cached.
            cache_salt: 1 to 1,024 characters; prompts share stored blocks only if their salts are
                equal.

        Raises:
            ConfigurationError: the ids or the mask have another shape, or there is padding inside
                or after a prompt.
            UsageError: the cache was closed.
        """
        if self._closed:
            raise UsageError("PromptCache: was closed; make another one")
        check_salt(cache_salt)
        prompts, doubt = prompt_rows(inputs, self._pad_token_ids())
        doubt = doubt or self._too_long(prompts) or self._padded(prompts)
        doubt = self._check(prompts) or doubt
        if doubt is not None:
            layers = empty_cache(self._model.config).layers
            return StoredCache(None, layers=layers, not_cached=note_doubt(*doubt))
        layouts = self._geometry.layouts
        rows = [
            CachedRow(
                self._maker.make(prompt.tokens, cache_salt=cache_salt), prompt.offset, layouts
            )
            for prompt in prompts
        ]
        restored = restore(
            self._store,
            layouts,
            rows,
            device=self._geometry.device,
            min_tokens=self._config.min_load_tokens,
            choice=self._choice,
        )
        layers = empty_cache(self._model.config).layers
        cache = StoredCache(self._saving, rows, restored, layers=layers)
        for prompt, loaded in zip(prompts, cache.loaded_tokens, strict=True):
            count("engine.request", prompt_tokens=len(prompt.tokens), store_tokens=loaded)
        with self._lock:
            self._live.add(cache)
        if ends := cache.snapshots.ends:
            compute_until(self._model, cache, inputs, ends)
            cache.prefilled()
        return cache

    def flush(self, timeout_s: float | None = None) -> bool:
        """Checks the model, saves all computed tokens, and blocks until they are stored.

        Args:
            timeout_s: the most seconds to block; by default ``save_timeout_s``.

        Returns:
            True if all tokens were stored or dropped in time. False inside of a forward pass, where
            no check runs.
        """
        until = time.monotonic() + (self._config.save_timeout_s if timeout_s is None else timeout_s)
        checked = self._check_to_save()
        saved = self._saving.ended.wait(max(0.0, until - time.monotonic()))
        return self._store.flush(max(0.0, until - time.monotonic())) and saved and checked

    def close(self) -> None:
        """Saves the remaining tokens for up to ``save_timeout_s``, then closes the store.

        Idempotent.
        """
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        self._check_to_save()
        self._hooks.remove()
        self._saving.ended.close(self._config.save_timeout_s)
        self._store.close()
        _open.discard(self)

    def _check(self, prompts: Sequence[PromptRow]) -> Change | None:
        """Returns the reason why `prompts` may not be loaded, or ``None``.

        If a check is due, this runs the canary and starts saves of everything computed before. If a
        prompt begins like one that is being saved, this waits for the save, at most
        ``lookup_timeout_ms``.
        """
        with self._guard.turn() as mine:
            if not mine:
                return Change(Doubt.STORE_CLOSED, "in a forked process, or a hook of the canary")
            if self._guard.doubt is None and not self._guard.is_due:
                return self._guard.autocast_doubt()
            saved = self._save_checked(whole=False)
        if saved is None:
            return self._guard.doubt
        size = self._geometry.layouts[0].tokens_per_block
        if any(one.begins_like(prompt.tokens[:size]) for one in saved for prompt in prompts):
            until = time.monotonic() + self._config.lookup_timeout_ms / 1000
            self._saving.ended.wait(max(0.0, until - time.monotonic()))
            self._store.flush(max(0.0, until - time.monotonic()))
        return self._guard.autocast_doubt()

    def _check_to_save(self) -> bool:
        """Runs the canary, and saves or drops everything that was computed.

        Returns:
            True if that is done; false during a forward pass of this thread.
        """
        with self._guard.turn() as mine:
            if not mine or self._hooks.in_pass:
                return False
            known = self._guard.doubt
            saved = self._save_checked(whole=True)
        if saved is None and known is None and self._guard.doubt is not None:
            note_doubt(*self._guard.doubt)
        return True

    def _save_checked(self, *, whole: bool) -> list[StoredCache] | None:
        """Saves caches as far as they are computed now, if the model is unchanged.

        Args:
            whole: true to include live caches, whose partly filled last block may grow.

        Returns:
            The saved caches; ``None`` if the model has changed, so that none is saved.
        """
        ended, dropped = self._saving.ended.take()
        if dropped:
            count("transformers.held.dropped", caches=dropped)
            warn_once(
                "transformers.held",
                f"{dropped} prompts were not saved: until the next prefill() or flush(), caches "
                "may hold held_bytes; give more, or call flush() more often",
            )
        with self._lock:
            live = list(self._live)
        caches: dict[StoredCache, bool] = dict.fromkeys(live, whole) | dict.fromkeys(ended, True)
        unsaved = {one: end for one, end in caches.items() if one.mark()}
        if whole and not unsaved:
            return []
        if (doubt := self._guard.check()) is not None:
            for one in caches:
                one.disown(doubt)
            return None
        for one, end in unsaved.items():
            one.vouch()
            if end or self._config.save_on != "finish":
                self._saving.ended.save(one, whole=end)
        return list(unsaved)

    def _too_long(self, prompts: Sequence[PromptRow]) -> Change | None:
        longest = max(len(prompt.tokens) for prompt in prompts)
        limit = self._geometry.limit
        if limit is None or longest <= limit.num_tokens:
            return None
        return Change(Doubt.TOO_LONG, f"over {limit.num_tokens} tokens ({limit.reason})")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _padded(self, prompts: Sequence[PromptRow]) -> Change | None:
        if not self._geometry.states or all(one.offset == 0 for one in prompts):
            return None
        return Change(Doubt.PADDED_STATES, "give prompts of one length, or one at a time")

    def _pad_token_ids(self) -> frozenset[int]:
        """Returns the ids that ``generate()`` treats as padding if there is no mask."""
        settings = self._model.generation_config
        pad, ends = settings.pad_token_id, settings.eos_token_id
        if pad is None or pad == ends or (isinstance(ends, list) and pad in ends):
            return frozenset()
        return frozenset({pad})


def _state_interval(given: object, tokens_per_block: int) -> int:
    if given is None:
        return max(_STATE_INTERVAL, tokens_per_block)
    if type(given) is not int or given < 1 or given % tokens_per_block:
        raise ConfigurationError(
            f"state_interval: {shown(given)} must be a multiple of tokens_per_block="
            f"{tokens_per_block}"
        )
    return given


def _held_nbytes(device: torch.device) -> int:
    """Returns an eighth of the memory that caches are in."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory) // 8
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8


def _store_config(connector: Connector) -> KvCacheConnectorConfig:
    if isinstance(connector, str):
        connector = {"url": connector}
    elif isinstance(connector, Backend):
        connector = {"backend": connector}
    if isinstance(connector, Mapping):
        connector = {"lookup_timeout_ms": _LOOKUP_TIMEOUT_MS} | dict(connector)
    config = config_of(connector)
    if config is None or (config.url is None and config.backend is None):
        raise ConfigurationError(
            f"connector: {shown(connector)} names no store; give a URL, for example "
            "'disk:///var/cache/kv?capacity=200GiB'"
        )
    if config.transfer is not None:
        raise ConfigurationError(
            "connector: transfer is between kvconnect's own engines; leave it out"
        )
    return config
