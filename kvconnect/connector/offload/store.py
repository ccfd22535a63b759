"""The open store that scheduler and worker of a process share, and a rank's blocks' way to it."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby

from kvconnect.backend import Backend
from kvconnect.backends.lanes import Lane
from kvconnect.backends.registry import codecs_of, open_backend
from kvconnect.config import KvCacheConnectorConfig
from kvconnect.connector.data import LlmArgs
from kvconnect.connector.offload.fetched import Fetched, fetched
from kvconnect.connector.offload.head_reader import HeadReader
from kvconnect.connector.offload.io_loop import IoLoop
from kvconnect.connector.offload.messages import BlockLoad
from kvconnect.connector.offload.staging import PoolCopier, Slot, StagingPool
from kvconnect.errors import ConfigurationError, RetryLater
from kvconnect.keys import BlockKey, store_key
from kvconnect.layout import KvCacheLayout
from kvconnect.redaction import without_passwords
from kvconnect.shards import StoredHeads
from kvconnect.trace import warn_once

__all__ = [
    "CALL_NBYTES",
    "LOADS_IN_FLIGHT",
    "SAVES_IN_FLIGHT",
    "BlockRoute",
    "OffloadStore",
    "stored_as",
]

CALL_NBYTES = 16 << 20
"""Blocks of one call to the store: so many that its fixed costs hardly show, few enough that a slow
store ends a call in time."""

LOADS_IN_FLIGHT = 3
"""Calls for one load at a time. As many pieces again may have arrived, and be copied meanwhile."""

SAVES_IN_FLIGHT = 3
"""Calls of all saves: one with the store, one before it and one behind it."""

# For the store to close once it is drained, and for threads to end after that.
_CLOSE_S = 1.0
_END_S = 0.25


class OffloadStore:
    """An open store with its I/O loop; made once per `LlmArgs` by the first that asks.

    Attributes:
        llm_args: whose.
        backend: guarded; to be used on the loop only.
        heads: of each pool group, which of the model's KV heads the rank has.
        enumerable: as the backend says.
        io: the loop.
        copying: threads that copy into the pool.
    """

    def __init__(self, llm_args: LlmArgs) -> None:
        config = llm_args.kv_connector_config
        source: Backend | str | None = llm_args.backend or config.backend or config.url
        if source is None:
            raise ConfigurationError("KvCacheConnectorConfig: url or backend is needed")
        self.llm_args = llm_args
        self.heads = llm_args.stored_heads
        # Every operation may take as long as the longer of the two; each direction has its own
        # deadline on top, see the worker.
        deadline_s = max(config.load_timeout_s, config.save_timeout_s)
        self.backend = open_backend(
            source,
            deadline_s=deadline_s,
            verify_frames=config.verify_frames,
            codec=config.codec,
            key_file=config.key_file,
        )
        self.enumerable = self.backend.capabilities.enumerable
        self._drain_until: float | None = None
        self.copying = Lane("kvconnect-copy", 2)
        with ExitStack() as threads:
            threads.callback(self.copying.join, _END_S)  # copies are short
            threads.callback(self.copying.end)
            self.io = IoLoop()
            threads.callback(self.io.close, _END_S)
            self._open(source, deadline_s)
            self._threads = threads.pop_all()

    def begin_close(self) -> float:
        """The drain begins: from the first call on `close` has ``save_timeout_s`` and a second.

        Returns:
            When the drain must be over, on the monotonic clock.
        """
        save_timeout_s = self.llm_args.kv_connector_config.save_timeout_s
        if self._drain_until is None:
            self._drain_until = time.monotonic() + save_timeout_s
        return self._drain_until

    def close(self) -> None:
        """Close the store and end the loop, within the time of `begin_close`; never raises."""
        until = self.begin_close() + _CLOSE_S
        closing = self.io.submit(self.backend.close())
        try:
            closing.result(max(0.0, until - time.monotonic()))
        except TimeoutError as error:
            closing.cancel()
            warn_once("connector.close", f"{self.backend.name}: did not close in time ({error})")
        finally:
            # A loop that a store blocks ends never: it is left behind, as are stuck threads.
            self.io.close(max(_END_S, until - time.monotonic()))
            self._threads.close()

    def _open(self, source: Backend | str, timeout_s: float) -> None:
        opening = self.io.submit(self.backend.open(self.llm_args.layouts))
        shown = without_passwords(source) if isinstance(source, str) else None
        name = type(source).__name__ if shown is None else repr(shown)
        try:
            opening.result(timeout_s)
        except ConfigurationError:
            raise
        except (RetryLater, TimeoutError) as error:
            reason = str(error) or f"no answer within {timeout_s:g} s"
            raise ConfigurationError(f"store {name} cannot be opened: {reason}") from error

    # ------------------------------------------------------------------ one per LlmArgs

    @classmethod
    def acquire(cls, llm_args: LlmArgs) -> OffloadStore:
        """The store of `llm_args`, opened by the first caller; blocks until it is open.

        Every caller calls `release` once.

        Raises:
            ConfigurationError: it cannot be opened.
        """
        with _lock:
            entry = _open_stores.get(id(llm_args))
            first = entry is None
            if entry is None:
                entry = _open_stores[id(llm_args)] = _Entry(llm_args)
            entry.users += 1
        if first:
            try:
                entry.store.set_result(cls(llm_args))
            except BaseException as error:
                with _lock:
                    _open_stores.pop(id(llm_args), None)
                entry.store.set_exception(error)
                raise
        return entry.store.result()

    def release(self) -> None:
        """One user less; the last one closes the store and blocks until it is closed."""
        with _lock:
            entry = _open_stores[id(self.llm_args)]
            entry.users -= 1
            last = entry.users == 0
            if last:
                del _open_stores[id(self.llm_args)]
        if last:
            self.close()


class _Entry:
    __slots__ = ("llm_args", "store", "users")

    def __init__(self, llm_args: LlmArgs) -> None:
        self.llm_args = llm_args  # keeps its id from being given to another
        self.store: Future[OffloadStore] = Future()
        self.users = 0


_open_stores: dict[int, _Entry] = {}
_lock = threading.Lock()


def stored_as(
    model_digest: bytes, config: KvCacheConnectorConfig | None, *, engine: str | None = None
) -> bytes:
    """What stands for the model of `model_digest` in the keys of blocks of this configuration.

    Another digest where blocks come back from the store rounded, or encrypted: engines with another
    codec or another encryption key do not find these blocks at all, rather than find and refuse
    them. Lossless compression makes no difference. And another one for each namespace.

    Args:
        model_digest: 32 bytes.
        config: ``None``: there is no store.
        engine: the kind of engine, whose namespace it is unless `config` names another; ``None``:
            kvconnect's own.

    Raises:
        ConfigurationError, MissingExtra: the codec, or its key file, cannot be used.
    """
    if config is None:
        return model_digest
    namespace = config.namespace or engine
    if namespace is not None:
        state = hashlib.blake2b(model_digest, digest_size=32, person=b"kvc-engines")
        state.update(namespace.encode())
        model_digest = state.digest()
    codecs = codecs_of(config.backend or config.url, codec=config.codec, key_file=config.key_file)
    if not codecs.identity:
        return model_digest
    state = hashlib.blake2b(codecs.identity, digest_size=32, person=b"kvc-codecs")
    state.update(model_digest)
    return state.digest()


def check_store(config: KvCacheConnectorConfig) -> None:
    """Checks the store of `config`, which is not opened: its scheme, parameters and codec.

    Raises:
        ConfigurationError: it can never be opened as it is configured.
    """
    if config.url is not None:
        open_backend(config.url, codec=config.codec, key_file=config.key_file)


@dataclass(frozen=True, slots=True)
class BlockRoute:
    """Store, staging memory and the copiers of a rank's pool groups. Thread-safe as those are.

    `heads` says for each group which part of the model's KV heads the rank has.
    """

    store: OffloadStore
    staging: StagingPool
    copiers: tuple[PoolCopier, ...]
    heads: tuple[StoredHeads, ...]
    reader: HeadReader

    @classmethod
    def of(
        cls, store: OffloadStore, staging: StagingPool, copiers: tuple[PoolCopier, ...]
    ) -> BlockRoute:
        """The route between `store` and the pools of `copiers`, through `staging`."""
        heads = store.heads
        reader = HeadReader(store.backend, store.copying, heads, staging)
        return cls(store, staging, copiers, heads, reader)

    @property
    def layouts(self) -> tuple[KvCacheLayout, ...]:
        """Of the pool groups."""
        return tuple(copier.layout for copier in self.copiers)

    def slot_for(self, slot: Slot, group: int) -> Slot:
        """`slot` with just the room that a block of `group` takes."""
        return slot.sized(self.copiers[group].layout.block_nbytes)

    def store_key(self, key: BlockKey, group: int) -> BlockKey:
        """What the store knows the rank's block of `group` with this `key` by."""
        return store_key(key, group, self.heads[group].own)

    def saves(self, group: int) -> bool:
        """Whether the rank saves its blocks of `group`: no other one saves the same heads."""
        return self.heads[group].is_first or not self.store.backend.capabilities.shared

    def wait_for_copies_in(self, groups: Iterable[int] | None = None) -> None:
        """Block until the copies into the pools (of `groups`) enqueued so far are over."""
        for group in range(len(self.copiers)) if groups is None else groups:
            event = self.copiers[group].mark_copies_in()
            if event is not None:
                event.synchronize()

    async def fetch(self, blocks: Sequence[BlockLoad], slots: Sequence[Slot]) -> Fetched:
        """Read `blocks` from the store into `slots`, each of its block's size. On its loop."""
        filled = 0
        for shares, same in groupby(blocks, _other_shares):
            run = list(same)
            rooms = slots[filled : filled + len(run)]
            if shares is None:
                keys = [self.store_key(block.key, block.group) for block in run]
                frames = [slot.frame for slot in rooms]
                got = await fetched(self.store.backend.load(keys, frames), len(run))
            else:
                got = await self.reader.fetch(run, rooms, shares[1])
            filled += got.filled
            if got.filled < len(run):
                return replace(got, filled=filled)
        return Fetched(filled)


def _other_shares(block: BlockLoad) -> tuple[int, int] | None:
    """Pool group and number of shares of a block that no rank of this size saved, else ``None``."""
    return None if block.shares is None else (block.group, block.shares)
