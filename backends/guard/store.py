"""The guard around every backend: deadline, breaker, frames, mapped errors, trace."""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from kvconnect.backend import Access, Backend, Child, StoredBlock, StoredEntry
from kvconnect.backends.guard.answers import (
    brief,
    wrong_in_children,
    wrong_in_entries,
    wrong_in_flags,
    wrong_in_numbers,
)
from kvconnect.backends.guard.breaker import BreakerState
from kvconnect.backends.guard.calls import Calls, Wanted, counted, mapped, unopened
from kvconnect.backends.guard.codecs import Codecs
from kvconnect.backends.guard.framed_store import FramedStore, load_counted
from kvconnect.backends.guard.frames import Framing
from kvconnect.backends.guard.gauges import GuardGauges
from kvconnect.backends.guard.labels import store_labels
from kvconnect.backends.guard.scan import scanned
from kvconnect.errors import BackendUnavailable, ConfigurationError, RetryLater
from kvconnect.frame import FrameChecksum
from kvconnect.keys import KEY_NBYTES, BlockKey
from kvconnect.layout import KvCacheLayout
from kvconnect.trace import Labels, Span, trace

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("kvconnect")

T = TypeVar("T")


class GuardedBackend(Backend):
    """A backend that guards `inner`: every call ends in time, and `load` returns what was saved.

    Runs on one event loop. Blocks that callers pass have frame buffers of
    ``frame_nbytes(layout.block_nbytes)`` bytes: `save` writes header and padding around the payload
    in place, `load` checks them. With `codecs`, stored frames are encoded on threads and in memory
    of the guard: the payload stays as it is.

    After five failures in a row, calls fail at once until a probe succeeds: a lookup in the
    background.

    With `raw`, values are passed unchanged, neither sealed nor checked: for tools that move or
    examine stored frames. Deadlines and mapped errors still apply.

    Attributes:
        inner: the backend itself.
        name: the name of the class of `inner`, for messages.
        place: the address of the store, if known; a label of its counters.
        codecs: the codecs of payloads.
    """

    def __init__(
        self,
        inner: Backend,
        *,
        deadline_s: float = 30.0,
        verify_frames: bool = True,
        raw: bool = False,
        codecs: Codecs | None = None,
        place: str = "",
    ) -> None:
        if deadline_s <= 0:
            raise ConfigurationError(f"deadline_s={deadline_s}: must be above 0 seconds")
        self.inner = inner
        self.capabilities = inner.capabilities.wrapped()
        self.deadline_s = deadline_s
        self.name = type(inner).__name__
        self.place = place
        self._labels: Labels = ()
        self._failed_load: tuple[BlockKey, int, Tensor] | None = None
        self._give_back_labels: Callable[[], object] | None = None
        self._calls = Calls(
            self.name,
            deadline_s,
            probe=self._probe,
            probe_load=self._probe_load,
        )
        self.codecs = codecs or Codecs()
        self._check_codecs(raw=raw, verify_frames=verify_frames)
        self._framed: FramedStore | None = None
        if not raw:
            framing = Framing(self.name, self.codecs, verify=verify_frames)
            self._framed = FramedStore(inner, framing, self.name)
            if not verify_frames:
                logger.warning(
                    "%s: loaded blocks are not checked (verify_frames is off)", self.name
                )
        self._layouts: tuple[KvCacheLayout, ...] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._gauges = GuardGauges(self._calls, inner.stats)

    def _check_codecs(self, *, raw: bool, verify_frames: bool) -> None:
        if not self.codecs:
            return
        reason = ""
        if raw:
            reason = "raw access moves frames as they are, encoded or not; leave it out"
        elif self.codecs.compression and not self.capabilities.variable_length:
            reason = (
                f"{self.name} loads values of known length only (variable_length is False); "
                "leave zstd or lz4 out"
            )
        elif not verify_frames:
            reason = "frames must be checked before they are decoded; leave verify_frames on"
        if reason:
            raise ConfigurationError(f"codec={self.codecs}: {reason}")

    @property
    def available(self) -> bool:
        """Returns whether calls reach the store (its breaker is closed); safe on any thread."""
        return self._calls.state is BreakerState.CLOSED

    async def open(self, layouts: Sequence[KvCacheLayout], access: Access = "store") -> None:
        """Opens `inner`. If this raises, `close` may still be called, or `open` once more.

        Without `layouts`, frames of any layout are loaded, and none can be saved but `raw`.
        """
        if self._calls.closed:
            raise BackendUnavailable(f"{self.name}: is closed")
        self._calls.deadline_s = self.inner.deadline_s = self.deadline_s
        self._take_labels()
        if self._framed is not None:
            self._framed.set_layouts(layouts)
        with self._trace("open"):
            await self._calls.run(
                "open", lambda _: self.inner.open(layouts, access=access), always=True
            )
        self._layouts = tuple(layouts)
        self._gauges.show(asyncio.get_running_loop(), self._labels)

    async def abort(self) -> None:
        """Reverts `open`, within the deadline; `open` may be called again. Never raises."""
        self._gauges.hide()
        with suppress(ConfigurationError, RetryLater):
            await self._calls.run("close", lambda _: self.inner.close(), always=True)

    async def close(self) -> None:
        """Waits for calls in flight up to the deadline, then closes `inner`, within another one.

        Never raises for a store that is gone. A second call waits for the first one, if that still
        runs. If the caller is cancelled, closing continues, because a half-closed store would keep
        its resources.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="kvconnect-close")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._gauges.hide()
        await self._calls.drain()
        try:
            with self._trace("close"):
                await self._calls.run("close", lambda _: self.inner.close(), always=True)
        except (ConfigurationError, RetryLater) as error:
            logger.warning("%s", error)
        if self._framed is not None:
            self._framed.framing.close()
        if self._give_back_labels is not None:
            self._give_back_labels()

    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        """Returns how many leading `keys` are present, within the deadline; updates recency."""
        self._opened()
        with self._trace("lookup", blocks=len(keys)) as span:
            found = await self._calls.run("lookup", lambda _: self._lookup(keys))
            span.set(found=found, misses=int(found < len(keys)))
        return found

    async def probe(self, within_s: float) -> None:
        """Looks up a key that no block has; raises if the answer takes more than `within_s`.

        The deadline of all calls applies, too.

        Raises:
            BackendTimeout, BackendUnavailable: the store does not work, or its breaker is open.
        """
        self._opened()
        await self._calls.run(
            "lookup", lambda _: self._probe(), deadline_s=min(within_s, self._calls.deadline_s)
        )

    async def load(
        self,
        keys: Sequence[BlockKey],
        into: Sequence[Tensor],
        checksums: Sequence[FrameChecksum] = (),
        layout: KvCacheLayout | None = None,
    ) -> int:
        """Fills `into` with the frames of `keys`; returns how many leading ones are sound.

        A damaged or foreign frame ends the run, is deleted from the store and counted
        (``store.bad_frame``). One that was encoded with other codecs or another key ends the run,
        too, and stays (``store.other_codec``). Payloads are decoded; headers stay as they were
        stored. Hashing and decoding happen on threads of their own.

        Args:
            keys: the keys of the blocks.
            into: receives the frames.
            checksums: those of `load_hashed`.
            layout: the layout of all frames, which need not be one of those of `open`; a frame of
                any other layout counts as damaged. ``None``: the layouts of `open`.

        Raises:
            BackendTimeout: `into` belongs to the call until `pending` is done.
            BackendUnavailable: all of `into` is undefined; the store does not write to it any more.
        """

        def start(wanted: Wanted) -> Coroutine[Any, Any, int]:
            if self._framed is None:
                return load_counted(self.inner, keys, into, checksums, self.name)
            return self._framed.load(keys, into, wanted, layout)

        self._opened()
        with self._trace("load", blocks=len(keys)) as span:
            try:
                loaded = await self._calls.run("load", start, holds_buffers=True)
            except RetryLater:
                if keys:
                    self._failed_load = keys[0], into[0].numel(), into[0].new_empty(0)
                raise
            span.set(loaded=loaded, bytes=sum(buffer.numel() for buffer in into[:loaded]))
        return loaded

    async def load_hashed(
        self, keys: Sequence[BlockKey], into: Sequence[Tensor], checksums: Sequence[FrameChecksum]
    ) -> int:
        """Loads like `load`. With `raw` the store may take `checksums`, which the caller checks.

        Without `raw` the guard checks the frames itself and does not use `checksums`.
        """
        return await self.load(keys, into, checksums)

    async def save(self, blocks: Sequence[StoredBlock]) -> int:
        """Seals the frames in ``block.data`` in place and stores them; returns how many are stored.

        With codecs, the stored frames are made in other memory, and ``block.data`` is not
        necessarily sealed; nor is it for blocks that were present before or are not stored.

        Raises:
            BackendTimeout: the buffers belong to the call until `pending` is done.
            BackendUnavailable: each block is stored wholly or not at all.
        """
        self._opened()
        with self._trace("save", blocks=len(blocks)) as span:
            saved = await self._calls.run(
                "save", lambda wanted: self._save(blocks, wanted), holds_buffers=True
            )
            span.set(saved=saved, bytes=sum(block.data.numel() for block in blocks[:saved]))
        return saved

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Deletes the blocks of `keys`, within the deadline."""
        self._opened()
        with self._trace("delete", blocks=len(keys)):
            await self._calls.run("delete", lambda _: self.inner.delete(keys))

    async def children(self, key: BlockKey | None) -> Sequence[Child]:
        """Returns the stored blocks whose parent is `key`, within the deadline."""
        with self._trace("children"):
            ask = partial(self.inner.children, key)
            found = await self._ask("children", ask, wrong_in_children)
        return found if self._framed is None else self._framed.framing.children(key, found)

    async def scan(self) -> AsyncIterator[StoredEntry]:
        """Yields an entry of every stored block; each step of some entries within the deadline."""
        self._opened()
        async for entry in scanned(self._calls, self.inner.scan, self.name):
            yield self._readable(entry)

    async def describe(self, keys: Sequence[BlockKey]) -> Sequence[StoredEntry | None]:
        """Returns the entry that `scan` would yield for each of `keys`, within the deadline."""
        wrong_in = partial(wrong_in_entries, count=len(keys))
        return await self._ask("describe", lambda: self.inner.describe(keys), wrong_in)

    async def pin(self, keys: Sequence[BlockKey], until: float | None) -> Sequence[bool]:
        """Pins or unpins `keys`, within the deadline; returns for each whether it is or was pinned.

        Raises:
            ConfigurationError: `inner` has no pins.
        """
        wrong_in = partial(wrong_in_flags, count=len(keys))
        return await self._ask("pin", lambda: self.inner.pin(keys, until), wrong_in)

    async def scrub(self) -> bool:
        """Overwrites some bytes of dropped blocks, within the deadline; see `Backend.scrub`."""
        self._opened()
        return bool(await self._calls.run("scrub", lambda _: self.inner.scrub()))

    async def stats(self) -> Mapping[str, float]:
        """Returns numbers about the store, and about the calls to it.

        ``breaker_state`` is 0 (closed), 1 (half-open) or 2 (open); unless it is 0 the store itself
        is not called. ``running`` counts calls that have not ended, ``abandoned`` those of them
        past their deadline.
        """
        self._opened()
        numbers: Mapping[str, float] = {}
        if self.available:
            numbers = await self._ask("stats", self.inner.stats, wrong_in_numbers)
        return {**numbers, **self._calls.numbers()}

    def parts(self) -> Mapping[str, Backend]:
        """Returns the parts of `inner`."""
        return self.inner.parts()

    def register(self, region: Tensor) -> None:
        """Registers memory that buffers will come from with `inner`."""
        with mapped(self.name, "register"):
            self.inner.register(region)

    def _opened(self) -> tuple[KvCacheLayout, ...]:
        if self._layouts is None:
            raise unopened(self.name)
        return self._layouts

    def _take_labels(self) -> None:
        # Labels are taken at the opening, because unopened stores count nothing.
        if self._give_back_labels is None:
            self._labels = self._calls.labels = store_labels.take(self.name, self.place)
            if self._framed is not None:
                self._framed.labels = self._labels
            self._give_back_labels = weakref.finalize(self, store_labels.give_back, self._labels)

    def _trace(self, operation: str, **values: float) -> Span:
        return trace(f"store.{operation}", self._labels, **values)

    async def _ask(
        self,
        operation: str,
        start: Callable[[], Awaitable[T]],
        wrong_in: Callable[[object], Iterator[object]],
    ) -> T:
        """Returns the answer of `inner`, within the deadline.

        Raises:
            BackendUnavailable: something is `wrong_in` the answer, which fails the call.
        """

        async def asked(_: Wanted) -> T:
            answer = await start()
            for wrong in wrong_in(answer):
                raise BackendUnavailable(f"{self.name}: {operation} answered {brief(wrong)}")
            return answer

        self._opened()
        return await self._calls.run(operation, asked)

    async def _probe(self) -> None:
        await self._lookup([BlockKey(os.urandom(KEY_NBYTES))])

    async def _probe_load(self, _: Wanted) -> None:
        """Loads the first block of the last load that failed, into memory of its own."""
        if self._failed_load is None:
            await self._probe()
            return
        key, nbytes, like = self._failed_load
        await load_counted(self.inner, [key], [like.new_empty(nbytes)], (), self.name)

    async def _lookup(self, keys: Sequence[BlockKey]) -> int:
        return counted(await self.inner.lookup(keys), len(keys), self.name, "lookup")

    async def _save(self, blocks: Sequence[StoredBlock], wanted: Wanted) -> int:
        if self._framed is None:
            return counted(await self.inner.save(blocks), len(blocks), self.name, "save")
        return await self._framed.save(blocks, wanted)

    def was_damaged(self, key: BlockKey) -> bool:
        """Returns whether `key` is one of the last blocks whose frame could not be used."""
        return self._framed is not None and key in self._framed.damaged

    def _readable(self, entry: StoredEntry) -> StoredEntry:
        if self._framed is None or entry.tokens is None or self.codecs.cipher is None:
            return entry
        child = Child(entry.key, entry.tokens)
        found = self._framed.framing.children(entry.parent, [child])
        return replace(entry, tokens=found[0].tokens if found else None)
