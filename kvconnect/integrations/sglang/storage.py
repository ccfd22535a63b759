"""The storage backend that SGLang's cache controller calls."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kvconnect.backend import DEFAULT_RETENTION_PRIORITY
from kvconnect.connector.io.blocking import StoreAccess
from kvconnect.connector.io.orders import BlockSave
from kvconnect.digest.doubts import Doubt, note_doubt
from kvconnect.engine.at_exit import close_at_exit
from kvconnect.errors import UnsupportedModel
from kvconnect.integrations.core.arguments import make_arguments
from kvconnect.integrations.core.load_choice import LoadChoice, PlannedLoad
from kvconnect.integrations.core.metrics_port import tell_metrics
from kvconnect.integrations.core.models import digest_of_model
from kvconnect.integrations.core.requests import RequestMaker, extra_key_of
from kvconnect.integrations.sglang.host_pool import HostPool, HostStates, has_slots, is_last_state
from kvconnect.integrations.sglang.page_stats import PageStats
from kvconnect.integrations.sglang.server import Server
from kvconnect.integrations.sglang.settings import (
    ENGINE,
    rank_of,
    refuse_unserved,
    refuse_unserved_states,
    storage_settings,
)
from kvconnect.integrations.sglang.steps import steps
from kvconnect.integrations.sglang.weights import WeightGuard
from kvconnect.keys import BlockKey
from kvconnect.trace import count, warn_once


def _base() -> Any:
    """Returns SGLang's abstract class; without SGLang, `object`."""
    try:
        return import_module("sglang.srt.mem_cache.hicache_storage").HiCacheStorage
    except ImportError:
        return object


if TYPE_CHECKING:
    _Base = object
else:
    _Base = _base()


class KvConnectStorage(_Base):
    """The pages of SGLang's host pool in a store; called by its prefetch and backup threads.

    Keys are made of SGLang's page hashes (a chain over tokens, salt and extra key), the model's
    content, dtype, shape and this rank's share of the heads. A fault of the store raises nothing:
    pages that are not loaded are computed, and pages that are not stored are missing later. Pages
    whose load is predicted to take longer than computing them are reported as missing, unless no
    request waits for loads (``--hicache-storage-prefetch-policy best_effort``).

    Args:
        storage_config: SGLang's ``HiCacheStorageConfig``; ``extra_config`` holds the settings.
        kwargs: the options of SGLang, without effect.

    Raises:
        ConfigurationError: a setting is missing or wrong, or the model cannot be identified.
        UnsupportedModel: the ranks divide pages in a way that is not served, or keys and values of
            equal tokens are not equal.
    """

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        self._settings = storage_settings(storage_config)
        self._rank = rank_of(storage_config)
        self._num_stages = int(storage_config.pp_size)
        self._is_mla = bool(storage_config.is_mla_model)
        revision = self._settings.own.model_revision
        self._server = Server()
        self._directory = self._server.directory(str(storage_config.model_name))
        refuse_unserved(self._server, self._directory, is_named=revision is not None)
        self._weights = WeightGuard(self._server, is_named=revision is not None)
        self._digest = digest_of_model(self._directory, revision=revision)
        self._access: StoreAccess | None = None
        self._states: HostStates | None = None

    # ------------------------------------------------------------------ start and end

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Registers the host pool and opens the store.

        Raises:
            ConfigurationError: the store cannot be opened, a page has one token, or the pool
                holds pages that earlier weights may have computed.
            UnsupportedModel: the pool is of another form.
        """
        self._weights.refuse_older_pages(mem_pool_host)
        self.mem_pool_host = mem_pool_host
        self._pool = HostPool.of(mem_pool_host, is_mla=self._is_mla)
        layout = self._pool.layout
        self._stats = PageStats(layout.block_nbytes)
        with ExitStack() as undo:
            undo.callback(tell_metrics(ENGINE, self._settings.own))
            self._open()
            self._attached = undo.pop_all()
        self._explored: tuple[str, PlannedLoad] | None = None
        self._choice = steps.choice = self._make_choice(layout.tokens_per_block)
        steps.hook()
        close_at_exit(self)

    def _open(self) -> None:
        """Opens the store for the registered pools."""
        layout, states = self._pool.layout, self._states
        parts = () if states is None else states.parts
        layouts = [layout, *parts]
        heads = [1 if self._is_mla else layout.num_kv_heads * self._rank.tp_size]
        heads += [self._rank.tp_size] * len(parts)
        args = make_arguments(
            self._settings,
            self._directory,
            self._digest,
            layouts,
            shard=self._rank,
            num_kv_heads=heads,
        )
        kv_dtype = self._server.kv_dtype(layout.dtype)
        variant = {"kv_dtype": kv_dtype, **self._server.variant(self._directory, kv_dtype)}
        if states is not None:
            variant["states"] = self._server.state_kernels()
        namespace, self._root = RequestMaker(args, extra_key_of(self._settings, variant)).root()
        self._namespace = namespace.encode()
        planes = () if states is None else states.planes
        self._access = StoreAccess(args, [self._pool.planes, *planes])

    def _make_choice(self, tokens_per_page: int) -> LoadChoice:
        server = self._server
        chunk = server.setting("chunked_prefill_size")
        waits = server.setting("hicache_storage_prefetch_policy") != "best_effort"
        return LoadChoice(
            tokens_per_block=tokens_per_page,
            max_tokens=chunk if isinstance(chunk, int) and chunk > 0 else sys.maxsize,
            num_ahead=0 if server.is_set("disable_overlap_schedule") else 1,
            decides=self._settings.own.load_decisions and waits,
        )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Adds the pool of recurrent states to that of keys and values; refuses other pools.

        SGLang calls this after `register_mem_pool_host`, and before the first page is looked up.
        The store is opened again, since keys of a model with states name their shapes, too.

        Raises:
            ConfigurationError: the store cannot be opened.
            UnsupportedModel: the model keeps something else beside keys and values, or its states
                are of another form.
        """
        name = str(host_pool_name)
        if name == "kv":
            return
        if name != "mamba":
            raise UnsupportedModel(
                f"host pool '{name}': models that keep more than keys and values of all tokens and "
                "recurrent states (windows, sparse attention, draft models) are not served"
            )
        refuse_unserved_states(self._server, num_stages=self._num_stages)
        self._states = HostStates.of(host_pool, self._pool.layout.tokens_per_block)
        if self._access is not None:
            self._access.close()
            self._access = None
        self._open()

    def close(self) -> None:
        """Writes what is staged within ``save_timeout_s``, and closes the store. Idempotent."""
        if self._access is not None:
            if steps.choice is self._choice:
                steps.choice = None
            self._access.close()
            self._access = None
            self._attached.close()

    # ------------------------------------------------------------------ pages

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """Returns how many leading pages all ranks have stored and are to be loaded.

        A late answer counts as 0.
        """
        found = self._num_stored(keys)
        return found if self._loads(keys, found, extra_info) else 0

    def _loads(self, keys: Sequence[str], found: int, extra_info: Any) -> bool:
        """Returns whether `found` leading pages of `keys` are to be loaded."""
        if not found:
            return False
        size = self._choice.tokens_per_block
        start = len(getattr(extra_info, "prefix_keys", None) or ()) * size
        planned = self._choice.choose(start, start + found * size, start + len(keys) * size + 1)
        if planned is None:
            return False
        if planned.explores:
            self._explored = (keys[0], planned)
        return True

    def _num_stored(self, keys: Sequence[str]) -> int:
        access = self._usable()
        return 0 if access is None else access.lookup(self._keys(keys))

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Loads pages into the host pool; returns True for the leading ones that are sound.

        The memory of the other pages is undefined, and no longer written to.
        """
        access = self._usable()
        if access is None:
            return [False] * len(keys)
        if not keys:
            return []
        size = self._choice.tokens_per_block
        explored = self._explored
        whole = explored[1] if explored is not None and explored[0] == keys[0] else None
        load = self._choice.part(len(keys) * size, whole)
        begun = time.perf_counter()
        self._choice.start(load)
        loaded = access.load(self._keys(keys), self._pool.pages(host_indices))
        self._choice.end(load, loaded * size)
        self._stats.add_load(loaded, time.perf_counter() - begun)
        count("engine.loaded", blocks=loaded)
        return [number < loaded for number in range(len(keys))]

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Copies pages out of the host pool, to be written in the background.

        Blocks for room up to ``save_timeout_s``. Returns True for the leading pages that are being
        saved. Of a latent, only the first rank saves; the other ranks return True.
        """
        access = self._usable()
        if access is None:
            return [False] * len(keys)
        if not access.heads[0].is_first:
            return [True] * len(keys)
        prefix = getattr(extra_info, "prefix_keys", None) or ()
        names = self._keys([*prefix[-1:], *keys])
        parents = names if prefix else [self._root, *names]
        blocks = [
            BlockSave(
                key=key,
                parent=parent,
                number=len(prefix) + number,
                block_id=page,
                tokens=None,
                priority=DEFAULT_RETENTION_PRIORITY,
            )
            for number, (key, parent, page) in enumerate(
                zip(
                    names[len(prefix[-1:]) :],
                    parents,
                    self._pool.pages(host_indices),
                    strict=False,
                )
            )
        ]
        staged = access.save(blocks, namespace=self._namespace)
        self._stats.add_save(staged)
        return [number < staged for number in range(len(keys))]

    # ------------------------------------------------------------------ recurrent states

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[Any] | None = None,
        extra_info: Any = None,
    ) -> Any:
        """Returns how many leading pages are to be loaded, with the states at their end.

        Pools that are not registered count as empty. A late answer counts as 0.

        Returns:
            SGLang's ``PoolTransferResult``. The only prefix that it names as restorable is the
            longest one at whose end all ranks have stored their states.
        """
        made = import_module("sglang.srt.mem_cache.hicache_storage").PoolTransferResult
        access, transfers = self._usable(), pool_transfers or ()
        if access is None or self._states is None or not all(map(is_last_state, transfers)):
            return made(0, {}, [])
        stored, end = access.lookup_with_states(self._keys(keys))
        if not self._loads(keys, end, extra_info):
            return made(0, {}, [])
        return made(end, {"kv": stored, **{one.name: end for one in transfers}}, [end])

    def batch_get_v2(
        self, transfers: Sequence[Any], extra_info: Any = None
    ) -> dict[Any, list[bool]]:
        """Loads states into their host pool; returns which are there, by the name of the pool.

        The slots of the other states are unchanged.
        """
        access, states = self._usable(), self._states
        found = {one.name: [False] * len(one.keys or ()) for one in transfers}
        if access is not None and states is not None:
            for one in filter(has_slots, transfers):
                found[one.name] = states.load(access, self._keys(one.keys), one.host_indices)
        return found

    def batch_set_v2(
        self, transfers: Sequence[Any], extra_info: Any = None
    ) -> dict[Any, list[bool]]:
        """Copies states out of their host pool, to be written in the background.

        Blocks for room up to ``save_timeout_s``. Returns which are being saved, by the name of the
        pool. Every rank saves its part, also of a model whose latent only the first rank saves.
        """
        access, states = self._usable(), self._states
        found = {one.name: [False] * len(one.keys or ()) for one in transfers}
        if access is not None and states is not None:
            prefix = getattr(extra_info, "prefix_keys", None) or ()
            parent = [*self._keys(prefix[-1:]), self._root][0]
            for one in filter(has_slots, transfers):
                keys = [parent, *self._keys(one.keys)]
                found[one.name] = states.save(
                    access, keys, one.host_indices, namespace=self._namespace
                )
        return found

    def exists(self, key: str) -> bool:
        """Returns True if the page is stored."""
        return self._num_stored([key]) == 1

    def clear(self) -> None:
        """Does nothing: pages stay valid as long as the model is the same.

        ``kvconnect prune`` empties a store.
        """
        warn_once("sglang.clear", "the store keeps its blocks; `kvconnect prune URL` drops them")

    def get_stats(self) -> Any:
        """Returns the pages of each batch since the last call, for SGLang's metrics."""
        return None if self._access is None else self._stats.take()

    def _usable(self) -> StoreAccess | None:
        """Returns the store; ``None`` if it is closed, or if keys no longer name the weights."""
        if self._access is None:
            note_doubt(Doubt.STORE_CLOSED)
            return None
        if (how := self._weights.change()) is not None:
            note_doubt(
                Doubt.WEIGHTS_CHANGED,
                f"{how}; attach the storage again with a model_revision that names the new ones",
            )
            return None
        return self._access

    # ------------------------------------------------------------------ what only others call

    def get(self, *_: Any, **__: Any) -> None:
        """Loads nothing: pages are moved by the batch."""

    def batch_get(self, keys: Sequence[str], *_: Any, **__: Any) -> list[None]:
        """Loads nothing; see `batch_get_v1`."""
        return [None] * len(keys)

    def set(self, *_: Any, **__: Any) -> bool:
        """Stores nothing: pages are moved by the batch."""
        return False

    def batch_set(self, *_: Any, **__: Any) -> bool:
        """Stores nothing; see `batch_set_v1`."""
        return False

    def _keys(self, hashes: Sequence[str]) -> list[BlockKey]:
        """Returns chained keys. A page's hash covers all tokens before the page, too."""
        return [
            BlockKey(
                hashlib.blake2b(
                    self._root + one.encode(), digest_size=32, person=b"kvc-sglang"
                ).digest()
            )
            for one in hashes
        ]
