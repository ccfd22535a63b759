"""The open store that scheduler and worker of a process share."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack

from kvconnect.backend import Backend
from kvconnect.backends.lanes import Lane
from kvconnect.backends.registry import open_backend
from kvconnect.backends.tiered.settings import parse_tiered
from kvconnect.backends.url import StoreUrl
from kvconnect.config import KvCacheConnectorConfig
from kvconnect.connector.data import LlmArgs
from kvconnect.connector.io.io_loop import IoLoop
from kvconnect.errors import ConfigurationError, RetryLater
from kvconnect.redaction import without_passwords
from kvconnect.trace import warn_once

# Seconds for a drained store to close, and for threads to end after that.
_CLOSE_S = 1.0
_END_S = 0.25


class OffloadStore:
    """An open store with its I/O loop; made once per `LlmArgs` by the first `acquire`.

    Attributes:
        llm_args: the arguments that name the store.
        backend: the guarded store; use it on the loop only.
        heads: the KV heads of the model that the rank has, for each pool group.
        io: the I/O loop.
        copying: threads that copy into the pool.
    """

    def __init__(self, llm_args: LlmArgs) -> None:
        config = llm_args.kv_connector_config
        source: Backend | str | None = llm_args.backend or config.backend or config.url
        if source is None:
            raise ConfigurationError("KvCacheConnectorConfig: url or backend is needed")
        self.llm_args = llm_args
        self.heads = llm_args.stored_heads
        # The store's deadline is the longer of the two; the worker adds one for each direction.
        deadline_s = max(config.load_timeout_s, config.save_timeout_s)
        self.backend = open_backend(
            source,
            deadline_s=deadline_s,
            verify_frames=config.verify_frames,
            codec=config.codec,
            key_file=config.key_file,
        )
        self._drain_until: float | None = None
        self.copying = Lane("kvconnect-copy", 2)
        with ExitStack() as threads:
            threads.callback(self.copying.join, _END_S)  # copies are short
            threads.callback(self.copying.end)
            self.io = IoLoop()
            threads.callback(self.io.close, _END_S)
            self._open(source, deadline_s)
            self._threads = threads.pop_all()

    @property
    def saves_tails(self) -> bool:
        """Returns whether tails are saved: the store lists them, and the settings ask for them."""
        wanted = self.llm_args.kv_connector_config.save_partial_tails
        return wanted and self.backend.capabilities.enumerable

    def check_ttl(self) -> bool:
        """Returns whether the store can expire the blocks of one request before others.

        If it cannot, a warning is logged once.
        """
        expires_each = self.backend.capabilities.expires_each
        if not expires_each:
            warn_once(
                f"connector.ttl {self.backend.name}",
                f"{self.backend.name}: cannot expire single blocks; the ttl of requests has no "
                "effect there, only the store's own ttl= has",
            )
        return expires_each

    def begin_close(self) -> float:
        """Starts the drain: `close` has ``save_timeout_s`` and a second from the first call on.

        Returns:
            The monotonic time at which the drain must have ended.
        """
        save_timeout_s = self.llm_args.kv_connector_config.save_timeout_s
        if self._drain_until is None:
            self._drain_until = time.monotonic() + save_timeout_s
        return self._drain_until

    def close(self) -> None:
        """Closes the store and ends the loop, within the time of `begin_close`; never raises."""
        until = self.begin_close() + _CLOSE_S
        closing = self.io.submit(self.backend.close())
        try:
            closing.result(max(0.0, until - time.monotonic()))
        except TimeoutError as error:
            closing.cancel()
            warn_once("connector.close", f"{self.backend.name}: did not close in time ({error})")
        finally:
            # A loop that a store blocks never ends: it is abandoned, as are stuck threads.
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
        """Returns the store of `llm_args`. The first caller opens it; blocks until it is open.

        Every caller calls `release` once.

        Raises:
            ConfigurationError: the store cannot be opened.
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
        """Removes one user; the last one closes the store and blocks until it is closed."""
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


def store_ttl_s(config: KvCacheConnectorConfig) -> float | None:
    """Returns the seconds after which a block expires in the store of `config`, from its URL.

    That is the longest time of all tiers. ``None``: never, or the URL does not say.
    """
    if config.url is None:
        return None
    try:
        url = StoreUrl.parse(config.url)
        tiers = parse_tiered(url)[0] if url.scheme == "tiered" else [config.url]
        times = [StoreUrl.parse(tier).duration("ttl") for tier in tiers]
        known = [one for one in times if one is not None]
        return max(known) if len(known) == len(times) else None
    except ConfigurationError:  # a scheme of others may mean something else by that name
        return None
