"""A tier of a tiered store: guarded, checked, and skipped while it does not answer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from kvconnect.backend import Access, Backend, StoredBlock
from kvconnect.backends.guard.codecs import Codecs
from kvconnect.backends.guard.frames import Framing
from kvconnect.backends.guard.store import GuardedBackend
from kvconnect.backends.tiered.backlog import Backlog
from kvconnect.backends.tiered.settings import TieredSettings, Write
from kvconnect.errors import BackendTimeout, BackendUnavailable, ConfigurationError
from kvconnect.keys import KEY_NBYTES, BlockKey
from kvconnect.layout import KvCacheLayout
from kvconnect.trace import count, warn_once

S = TypeVar("S")
T = TypeVar("T")

# The pauses between probes of a tier that did not answer, and how long a probe may take.
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_PROBE_S = 1.0
_DRAIN_S = 5.0
_MAX_OWED = 1 << 16
_FAILED = object()


class Tier:
    """A store of a tiered one. All methods run on one event loop.

    A tier that missed its deadline is not `alive`: no call is made to it until it has answered a
    probe in the background. One that answers, but not within `patience_s`, is not
    `prompt`: it is written to and loaded from, but no lookup waits for it. One that cannot be
    reached at `open` is opened later.

    Args:
        store: not open yet.
        name: unique among the tiers.
        settings: the settings of the whole.
        write: whether `save` of the whole waits for this tier.
        place: the store's address, a label of its counters.

    Attributes:
        verify_frames: whether a value that is no sound frame of its key is deleted and not loaded.
        framing: checks frames.
    """

    def __init__(
        self,
        store: Backend,
        name: str,
        settings: TieredSettings,
        *,
        write: Write,
        place: str,
    ) -> None:
        self.guard = GuardedBackend(store, deadline_s=settings.deadline_s, raw=True, place=place)
        self.framing = Framing(name, Codecs(), verify=True)
        self.name = name
        self.write: Write = write
        self.verify_frames = settings.verify_frames
        self.prompt = False
        self._patience_s = settings.patience_s
        self._alive = asyncio.Event()
        self._layouts: tuple[KvCacheLayout, ...] = ()
        self._access: Access = "store"
        self._is_open = False
        self._closed = False
        self._probing: asyncio.Task[None] | None = None
        self._owed: set[BlockKey] = set()
        self.backlog = Backlog(
            name,
            save=self.save,
            delete=self._delete,
            owe=self._owe,
            ready=self._alive.wait,
            limit=settings.queue_nbytes,
        )

    @property
    def alive(self) -> bool:
        """Returns whether calls to the tier are allowed."""
        return self._alive.is_set()

    async def open(
        self, layouts: Sequence[KvCacheLayout], access: Access
    ) -> BackendUnavailable | None:
        """Opens the store; if that cannot be done now, tries again in the background.

        With another `access` than ``store``, frames are loaded unchecked, so that nothing changes.

        Returns:
            Why it could not be opened now.

        Raises:
            ConfigurationError: it can never be opened.
        """
        self._layouts, self._access = tuple(layouts), access
        self.verify_frames = self.verify_frames and access == "store"
        try:
            await self._open()
        except (BackendUnavailable, BackendTimeout) as error:
            self.skip(f"cannot be opened: {error}")
            if isinstance(error, BackendUnavailable):
                return error
            return BackendUnavailable(str(error))
        return None

    async def close(self) -> None:
        """Writes waiting blocks, if the tier answers; closes the store. Never raises."""
        if self._closed:
            return
        self._closed = True
        if self._probing is not None:
            self._probing.cancel()
        await self.backlog.close(_DRAIN_S if self.alive else 0.0)
        self._alive.clear()
        await self.guard.close()
        self.framing.close()

    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        """Returns how many leading `keys` are here; 0 if the store fails. May take its deadline."""
        return await self.answer(self.guard.lookup(keys), 0)

    async def save(self, blocks: Sequence[StoredBlock]) -> int:
        """Stores `blocks`; returns how many leading ones are stored, 0 if the store fails.

        Raises:
            BackendTimeout: the data belongs to the call until `pending` is done.
        """
        if not self.alive:
            return 0
        self._owed.difference_update(block.key for block in blocks)
        return await self.answer(self.guard.save(blocks), 0, holds_buffers=True)

    async def delete(self, keys: Sequence[BlockKey]) -> bool:
        """Deletes `keys`, now or when the tier answers again; returns whether it was now."""
        self.backlog.forget(keys)
        return await self._delete(keys)

    async def abort(self) -> None:
        """Reverts `open`, which may be called again. Never raises."""
        if self._probing is not None:
            self._probing.cancel()
        self._is_open = False
        self._alive.clear()
        await self.guard.abort()

    def note_slow(self) -> None:
        """Records a lookup without an answer within `patience_s`: further ones do not wait."""
        if self.prompt:
            count("store.tiered.slow")
        self.prompt = False
        self._start_probing()

    def skip(self, reason: str) -> None:
        """Records that the tier did not answer: no calls are made until a probe succeeds."""
        if self.alive:
            count("store.tiered.skipped")
        self._alive.clear()
        self.prompt = False
        warn_once(f"tiered.skipped.{self.name}", f"tier {self.name} is skipped: {reason}")
        self._start_probing()

    async def answer(
        self, call: Coroutine[Any, Any, T], otherwise: S, *, holds_buffers: bool = False
    ) -> T | S:
        """Returns the result of `call` to the store; logs a failure and returns `otherwise`.

        Raises:
            BackendTimeout: if the call `holds_buffers`: it owns them until `pending` is done.
        """
        try:
            return await call
        except BackendTimeout as error:
            self.skip(str(error))
            if holds_buffers and error.pending is not None:
                raise
        except (BackendUnavailable, ConfigurationError) as error:
            warn_once(f"tiered.failed.{self.name}", f"tier {self.name}: {error}")
        return otherwise

    async def _open(self) -> None:
        await self.guard.open(self._layouts, self._access)
        self._is_open = self.prompt = True
        self._alive.set()

    async def _delete(self, keys: Sequence[BlockKey]) -> bool:
        if self.alive and await self.answer(self.guard.delete(keys), _FAILED) is not _FAILED:
            return True
        self._owe(keys)
        return False

    def _owe(self, keys: Sequence[BlockKey]) -> None:
        if len(self._owed) + len(keys) <= _MAX_OWED:
            self._owed.update(keys)
        else:
            warn_once(
                f"tiered.owed.{self.name}",
                f"tier {self.name}: does not delete {len(keys)} blocks later, since too many wait "
                "for that; drop them again once it answers",
            )
        self._start_probing()

    def _start_probing(self) -> None:
        if self._probing is None and not self._closed:
            self._probing = asyncio.create_task(self._probe())

    async def _probe(self) -> None:
        # No caller waits for this: no request pays for a probe.
        pause = _FIRST_PAUSE_S
        try:
            while not self.prompt or self._owed:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
                await self._ask()
        except ConfigurationError as error:
            warn_once(f"tiered.refused.{self.name}", f"tier {self.name} stays out: {error}")
        finally:
            self._probing = None

    async def _ask(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            if not self._is_open:
                await self._open()
            asked = loop.time()
            async with asyncio.timeout(_PROBE_S):
                await self.guard.lookup([BlockKey(os.urandom(KEY_NBYTES))])
            seconds = loop.time() - asked
            if self._owed:
                owed = list(self._owed)
                await self.guard.delete(owed)
                self._owed.difference_update(owed)
        except (BackendUnavailable, TimeoutError):  # BackendTimeout is one, too
            return
        except ConfigurationError:
            if not self._is_open:
                raise
            return  # it was configured rightly once
        self._alive.set()
        self.prompt = seconds <= self._patience_s
