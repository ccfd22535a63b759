"""`PromptCache`: prompts that ``model.generate()`` has seen before are loaded, not computed."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor, nn
from transformers import PreTrainedModel

from kvconnect.backend import Backend
from kvconnect.config import KvCacheConfig, KvCacheConnectorConfig
from kvconnect.connector.data import LlmArgs
from kvconnect.connector.offload.store import stored_as
from kvconnect.engine.at_exit import close_at_exit
from kvconnect.engine.attachment import Connector, config_of
from kvconnect.errors import ConfigurationError, UsageError
from kvconnect.integrations.core.access import StoreAccess
from kvconnect.integrations.transformers.cached_row import CachedRow
from kvconnect.integrations.transformers.ended_caches import EndedCaches
from kvconnect.integrations.transformers.geometry import ModelGeometry
from kvconnect.integrations.transformers.identity import WeightVersions, digest_of_loaded
from kvconnect.integrations.transformers.restoring import restore
from kvconnect.integrations.transformers.rows import prompt_rows
from kvconnect.integrations.transformers.stored_cache import SavingTo, StoredCache
from kvconnect.keys import Namespace, check_salt, root_key
from kvconnect.text import shown
from kvconnect.trace import count, metrics, warn_once

__all__ = ["PromptCache"]

_open: set[PromptCache] = set()
"""All that were not closed: they live until the process exits, and are closed then."""

_ENGINE = "transformers"

# No other request waits meanwhile, and what is not found is computed for seconds.
_LOOKUP_TIMEOUT_MS = 1000.0


class PromptCache:
    """A store of prompts for one model of transformers.

    ``model.generate(**inputs, past_key_values=cache.prefill(inputs))`` loads what the store has of
    the prompts and computes the rest; what was computed, generated tokens included, is saved in the
    background. The answer is the one without it.

    It hooks into the model's forward pass, to see which tokens are computed, until it is closed.
    `prefill` may be called from several threads. Close it, or use it as a context manager: closing
    writes what is not saved yet. That also happens at a normal exit.

    Args:
        model: loaded with ``from_pretrained``, with a decoder only, on one device; its weights
            unchanged since. What is computed with weights that were changed later is not cached.
        connector: a store's URL, a store, or a configuration (or its fields as a dict). Given as a
            URL, lookups may take 1 s.
        tokens_per_block: tokens of a stored block. Engines share blocks of one size only.
        model_revision: names the weights, for example ``org/name@commit``, so that they need not be
            digested, nor come from a directory. The caller promises that no other weights go by
            this name among all engines of a store, adapters included.

    Raises:
        ConfigurationError: a setting is wrong, nothing tells the model from others, or the store
            cannot be opened. Nothing is left running.
        UnsupportedModel: the model keeps something else than keys and values; the message is the
            reason.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        connector: Connector,
        *,
        tokens_per_block: int = 32,
        model_revision: str | None = None,
    ) -> None:
        if not isinstance(model, PreTrainedModel):
            raise ConfigurationError(
                f"model: {shown(model)} is a {type(model).__name__}; give a model of transformers, "
                "as AutoModelForCausalLM.from_pretrained returns it, not wrapped"
            )
        config = _store_config(connector)
        cache_config = KvCacheConfig(tokens_per_block=tokens_per_block)
        digest = digest_of_loaded(model, model_revision)
        geometry = ModelGeometry.of(model, tokens_per_block)
        digest = stored_as(digest, config, engine=_ENGINE)
        self._model = model
        self._versions = WeightVersions(model)
        self._config = config
        self._geometry = geometry
        self._digest = digest
        args = LlmArgs(
            str(model.name_or_path), cache_config, config, geometry.layouts, model_digest=digest
        )
        self._store = StoreAccess(args, geometry.device)
        limit = geometry.limit
        self._saving = SavingTo(
            self._store,
            geometry.layouts,
            None if limit is None else limit.num_tokens,
            config.save_on == "finish",
            EndedCaches(),
        )
        self._lock = threading.Lock()  # of the two below, which several threads change
        self._live: weakref.WeakSet[StoredCache] = weakref.WeakSet()
        self._closed = False
        self._hooks = _Hooks(model, self._live)
        metrics.engine = _ENGINE
        _open.add(self)
        close_at_exit(self)

    def prefill(
        self, inputs: Mapping[str, object] | Tensor, *, cache_salt: str | None = None
    ) -> StoredCache:
        """A cache that begins with what the store has of `inputs`, for one call of ``generate()``.

        Blocks up to ``lookup_timeout_ms`` for the lookup and ``load_timeout_s`` for the load. A
        fault of the store costs time, nothing else. At least the last token is left to compute.

        Args:
            inputs: what ``generate()`` is called with: ``input_ids`` ``[batch, tokens]``, padded on
                the left, and ``attention_mask``; or just the ids. With other inputs beside them
                (pictures, embeddings) nothing is cached.
            cache_salt: 1 to 1,024 characters; prompts share stored blocks only if theirs is equal.

        Raises:
            ConfigurationError: the ids or the mask are of no such shape, or there is padding inside
                or after a prompt.
            UsageError: it was closed.
        """
        if self._closed:
            raise UsageError("PromptCache: was closed; make another one")
        check_salt(cache_salt)
        namespace = Namespace(cache_salt=cache_salt)
        prompts, reason = prompt_rows(inputs, self._pad_token_ids())
        longest = max(len(prompt.tokens) for prompt in prompts)
        limit = self._geometry.limit
        if limit is not None and longest > limit.num_tokens:
            reason = reason or f"{longest} tokens exceed {limit.num_tokens} ({limit.reason})"
        if self._versions.changed():
            reason = reason or "the model's weights were changed since PromptCache was made"
        if reason:
            count("engine.request.uncached")
            warn_once(f"transformers.{reason}", f"PromptCache: nothing is cached: {reason}")
            return StoredCache(None, not_cached=reason)
        layouts = self._geometry.layouts
        root = root_key(self._digest, layouts, namespace)
        rows = [
            CachedRow(
                prompt,
                root,
                tokens_per_block=layouts[0].tokens_per_block,
                namespace=namespace,
                num_groups=len(layouts),
            )
            for prompt in prompts
        ]
        restored = restore(
            self._store,
            layouts,
            rows,
            device=self._geometry.device,
            min_tokens=self._config.min_load_tokens,
        )
        cache = StoredCache(self._saving, rows, restored)
        for prompt, loaded in zip(prompts, cache.loaded_tokens, strict=True):
            count("engine.request", prompt_tokens=len(prompt.tokens), store_tokens=loaded)
        with self._lock:
            self._live.add(cache)
        return cache

    def flush(self, timeout_s: float | None = None) -> bool:
        """Save all that was computed so far, and block until it is stored.

        Args:
            timeout_s: at most so long; by default ``save_timeout_s``.

        Returns:
            Whether it was all stored, or given up, in time.
        """
        until = time.monotonic() + (self._config.save_timeout_s if timeout_s is None else timeout_s)
        self._save_live()
        saved = self._saving.ended.wait(max(0.0, until - time.monotonic()))
        return self._store.flush(max(0.0, until - time.monotonic())) and saved

    def close(self) -> None:
        """Save what is left, up to ``save_timeout_s``; let go of model and store. Idempotent."""
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        self._hooks.remove()
        self._save_live()
        self._saving.ended.close(self._config.save_timeout_s)
        self._store.close()
        _open.discard(self)

    def _save_live(self) -> None:
        with self._lock:
            live = list(self._live)
        for cache in live:
            cache.save()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pad_token_ids(self) -> frozenset[int]:
        """What ``generate()`` takes for padding where there is no mask."""
        settings = self._model.generation_config
        pad, ends = settings.pad_token_id, settings.eos_token_id
        if pad is None or pad == ends or (isinstance(ends, list) and pad in ends):
            return frozenset()
        return frozenset({pad})


class _Hooks:
    """Tells the live caches of a model of its forward passes, until they are removed."""

    def __init__(self, model: nn.Module, live: weakref.WeakSet[StoredCache]) -> None:
        self._live = live
        self._handles = (
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True),
        )

    def remove(self) -> None:
        """No cache is told any more."""
        for handle in self._handles:
            handle.remove()

    def _before(
        self, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        cache = named.get("past_key_values")
        if isinstance(cache, StoredCache) and cache in self._live:
            repeated = cache.num_repeated(named.get("input_ids"))
            if repeated:
                parts = ("input_ids", "position_ids")
                cut = {
                    one: named[one][..., repeated:] for one in parts if named.get(one) is not None
                }
                named = named | cut
            ids = named.get("input_ids", args[0] if args else None)
            cache.forward_begins(ids, named.get("attention_mask"), named.get("position_ids"))
        return args, named

    def _after(self, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any], __: Any) -> None:
        cache = named.get("past_key_values")
        if isinstance(cache, StoredCache) and cache in self._live:
            cache.forward_ended()


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
