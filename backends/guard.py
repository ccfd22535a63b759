"""What the framework puts around every backend: deadline, breaker, frames, mapped errors, trace."""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from torch import Tensor

from kvconnect.backend import Backend, Child, StoredBlock, StoredEntry
from kvconnect.backends.breaker import BreakerState
from kvconnect.backends.calls import Call, Calls, counted, mapped, together, unopened
from kvconnect.backends.checksums import ChecksFrames, HashesLoads, SealsSaves
from kvconnect.backends.codecs import Codecs
from kvconnect.backends.framing import Framing, pieces
from kvconnect.backends.guard_gauges import GuardGauges
from kvconnect.backends.store_labels import store_labels
from kvconnect.backends.wrapper import BackendWrapper
from kvconnect.errors import (
    BackendUnavailable,
    BadFrame,
    ConfigurationError,
    Recompute,
    RetryLater,
)
from kvconnect.frame import FrameChecksum
from kvconnect.keys import KEY_NBYTES, BlockKey
from kvconnect.layout import KvCacheLayout
from kvconnect.trace import Labels, Span, count, trace, warn_once

__all__ = ["GuardedBackend"]

logger = logging.getLogger("kvconnect")


class GuardedBackend(BackendWrapper):
    """`inner`, safe to call: every call ends in time, and what `load` returns is what was saved.

    Runs on one event loop. Blocks that callers pass have frame buffers of
    ``frame_nbytes(layout.block_nbytes)`` bytes: `save` writes header and padding around the payload
    in place, `load` checks them. With `codecs` what is stored is encoded, on threads and in memory
    of its own: the payload stays as it is.

    After `failures_to_open` failures in a row calls fail at once, until the store answers a lookup
    that is made in the background for this.

    With `raw` values pass as they are, neither sealed nor checked: for tools that move or examine
    what is stored. Time and errors are guarded all the same.

    Attributes:
        inner: the backend itself.
        name: for messages.
        place: where the store is, as far as that is known; a label of what is counted.
        codecs: what payloads are encoded with.
    """

    def __init__(
        self,
        inner: Backend,
        *,
        deadline_s: float = 30.0,
        verify_frames: bool = True,
        raw: bool = False,
        codecs: Codecs | None = None,
        failures_to_open: int = 5,
        place: str = "",
    ) -> None:
        if deadline_s <= 0:
            raise ConfigurationError(f"deadline_s={deadline_s}: must be longer than nothing")
        if failures_to_open < 1:
            raise ConfigurationError(f"failures_to_open={failures_to_open}: must be at least 1")
        self.inner = inner
        self.name = type(inner).__name__
        self.place = place
        self._labels: Labels = ()
        self._give_back_labels: Callable[[], object] | None = None
        self._calls = Calls(
            self.name,
            deadline_s,
            probe=self._probe,
            failures=failures_to_open,
        )
        self.codecs = codecs or Codecs()
        self._check_codecs(raw=raw, verify_frames=verify_frames)
        self._framing: Framing | None = None
        if not inner.device_buffers and not raw:
            self._framing = Framing(self.name, self.codecs, verify=verify_frames)
            if not verify_frames:
                logger.warning(
                    "%s: loaded blocks are not checked (verify_frames is off)", self.name
                )
        self._layouts: tuple[KvCacheLayout, ...] | None = None
        self._gauges = GuardGauges(self._calls, inner.stats)

    def _check_codecs(self, *, raw: bool, verify_frames: bool) -> None:
        if not self.codecs:
            return
        reason = ""
        if raw:
            reason = "raw access moves frames as they are, encoded or not; leave it out"
        elif self.inner.device_buffers:
            reason = f"{self.name} takes blocks of the device as they are; leave it out"
        elif self.codecs.compression and not self.inner.variable_length:
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
        """Whether calls reach the store: its breaker is closed. May be asked on any thread."""
        return self._calls.state is BreakerState.CLOSED

    async def open(self, layouts: Sequence[KvCacheLayout]) -> None:
        """Open `inner`. If this raises, `close` may still be called, or `open` once more.

        Without `layouts`, frames of any layout are loaded, and none can be saved but `raw`.
        """
        if self._calls.closed:
            raise BackendUnavailable(f"{self.name}: is closed")
        self._take_labels()
        if self._framing is not None:
            self._framing.set_layouts(layouts, variable_length=self.variable_length)
            checks = isinstance(self.inner, ChecksFrames) and self.inner.checks_frames
            self._framing.verified = checks
        with self._trace("open"):
            await self._calls.run_always("open", lambda _: self.inner.open(layouts))
        self._layouts = tuple(layouts)
        self._gauges.show(asyncio.get_running_loop(), self._labels)

    async def abort(self) -> None:
        """Take back `open`, within the deadline; it may be called again. Never raises."""
        self._gauges.hide()
        with suppress(ConfigurationError, RetryLater):
            await self._calls.run_always("close", lambda _: self.inner.close())

    async def close(self) -> None:
        """Wait for calls in flight up to the deadline, then close `inner`, within another one.

        Never raises for a store that is gone; the second time does nothing.
        """
        if self._calls.closed:
            return
        self._gauges.hide()
        await self._calls.drain()
        try:
            with self._trace("close"):
                await self._calls.run_always("close", lambda _: self.inner.close())
        except (ConfigurationError, RetryLater) as error:
            logger.warning("%s", error)
        if self._framing is not None:
            self._framing.close()
        if self._give_back_labels is not None:
            self._give_back_labels()

    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        """How many leading `keys` are present, within the deadline. Changes nothing but recency."""
        self._opened()
        with self._trace("lookup", blocks=len(keys)) as span:
            found = await self._calls.run("lookup", lambda _: self._lookup(keys))
            span.set(found=found, misses=int(found < len(keys)))
        return found

    async def probe(self, within_s: float) -> None:
        """Look up a key that nobody has. That it takes longer than `within_s` counts as a failure.

        The deadline of all calls holds, too.

        Raises:
            BackendTimeout, BackendUnavailable: the store does not work, or is left alone.
        """
        self._opened()
        await self._calls.run(
            "lookup", lambda _: self._probe(), deadline_s=min(within_s, self._calls.deadline_s)
        )

    async def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        """Fill `into` with the frames of `keys`; return how many leading ones are filled and sound.

        A damaged or foreign frame ends the run, is deleted from the store and counted
        (``store.bad_frame``). One that was encoded with other codecs or another key ends it, too,
        and stays (``store.other_codec``). Payloads are decoded; headers stay as they were stored.
        Hashing and decoding happen on threads of their own.

        Raises:
            BackendTimeout: `into` belongs to the call until `pending` is done.
            BackendUnavailable: all of `into` is undefined; nothing touches it any more.
        """
        return await self.load_hashed(keys, into, ())

    async def load_hashed(
        self, keys: Sequence[BlockKey], into: Sequence[Tensor], checksums: Sequence[FrameChecksum]
    ) -> int:
        """As `load`; with `raw`, for who checks frames himself: the store may take `checksums`."""
        self._opened()
        with self._trace("load", blocks=len(keys)) as span:
            loaded = await self._calls.run(
                "load", lambda call: self._load(keys, into, checksums, call), holds_buffers=True
            )
            span.set(loaded=loaded, bytes=sum(buffer.numel() for buffer in into[:loaded]))
        return loaded

    async def save(self, blocks: Sequence[StoredBlock]) -> int:
        """Seal the frames in ``block.data``, in place, and store them; return how many are stored.

        With codecs the stored frames are made elsewhere, and ``block.data`` may be sealed or not;
        likewise that of blocks which were there already, or are not stored.

        Raises:
            BackendTimeout: the buffers belong to the call until `pending` is done.
            BackendUnavailable: each block is stored wholly or not at all.
        """
        self._opened()
        with self._trace("save", blocks=len(blocks)) as span:
            saved = await self._calls.run(
                "save", lambda call: self._save(blocks, call), holds_buffers=True
            )
            span.set(saved=saved, bytes=sum(block.data.numel() for block in blocks[:saved]))
        return saved

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Forget `keys`, within the deadline."""
        self._opened()
        with self._trace("delete", blocks=len(keys)):
            await self._calls.run("delete", lambda _: self.inner.delete(keys))

    async def children(self, key: BlockKey | None) -> Sequence[Child]:
        """The stored blocks whose parent is `key`, within the deadline."""
        self._opened()
        with self._trace("children"):
            found = await self._calls.run("children", lambda _: self.inner.children(key))
        return found if self._framing is None else self._framing.children(key, found)

    async def scan(self) -> AsyncIterator[StoredEntry]:
        """Everything that is stored; each step within the deadline."""
        self._opened()
        entries = aiter(self.inner.scan())

        async def following(_: Call) -> StoredEntry | None:
            return await anext(entries, None)

        while (entry := await self._calls.run("scan", following)) is not None:
            yield self._readable(entry)

    async def describe(self, keys: Sequence[BlockKey]) -> Sequence[StoredEntry | None]:
        """What `scan` would list of each of `keys`, within the deadline."""
        self._opened()
        found = await self._calls.run("describe", lambda _: self.inner.describe(keys))
        if len(found) == len(keys):
            return found
        raise BackendUnavailable(f"{self.name}: describe of {len(keys)} blocks answered {found!r}")

    async def stats(self) -> Mapping[str, float]:
        """Numbers about the store, and about the calls to it.

        ``breaker_state`` is 0 (closed: calls are made), 1 (half-open) or 2 (open); unless it is 0
        the store itself is not asked. ``running`` are calls that have not ended, ``abandoned``
        those of them that are past their deadline.
        """
        self._opened()
        numbers: Mapping[str, float] = {}
        if self.available:
            numbers = await self._calls.run("stats", lambda _: self.inner.stats())
        return {**numbers, **self._calls.numbers()}

    def register(self, region: Tensor) -> None:
        """Tell `inner` of memory that buffers will come from."""
        with mapped(self.name, "register"):
            self.inner.register(region)

    async def pin(self, keys: Sequence[BlockKey], ttl: float) -> int:
        """Keep `keys` from eviction for `ttl` seconds, within the deadline."""
        self._opened()
        answer = await self._calls.run("pin", lambda _: self.inner.pin(keys, ttl))
        return counted(answer, len(keys), self.name, "pin")

    def _opened(self) -> tuple[KvCacheLayout, ...]:
        if self._layouts is None:
            raise unopened(self.name)
        return self._layouts

    def _take_labels(self) -> None:
        # Only what is opened counts anything, and may keep others from the same labels.
        if self._give_back_labels is None:
            self._labels = self._calls.labels = store_labels.take(self.name, self.place)
            self._give_back_labels = weakref.finalize(self, store_labels.give_back, self._labels)

    def _trace(self, operation: str, **values: float) -> Span:
        return trace(f"store.{operation}", self._labels, **values)

    async def _probe(self) -> None:
        await self._lookup([BlockKey(os.urandom(KEY_NBYTES))])

    async def _lookup(self, keys: Sequence[BlockKey]) -> int:
        return counted(await self.inner.lookup(keys), len(keys), self.name, "lookup")

    def _readable(self, entry: StoredEntry) -> StoredEntry:
        if self._framing is None or entry.tokens is None or self.codecs.cipher is None:
            return entry
        child = Child(entry.key, entry.tokens)
        found = self._framing.children(entry.parent, [child])
        return replace(entry, tokens=found[0].tokens if found else None)

    async def _load(
        self,
        keys: Sequence[BlockKey],
        into: Sequence[Tensor],
        taken: Sequence[FrameChecksum],
        call: Call,
    ) -> int:
        if self._framing is None:
            return await self._fill(keys, into, taken)
        rooms = self._framing.rooms(into)
        taken = self._framing.checksums(rooms) if isinstance(self.inner, HashesLoads) else ()
        sound = 0
        parts = list(pieces(into))
        filled = 0
        if parts:
            filled = await self._fill(keys[parts[0]], rooms[parts[0]], taken[parts[0]])
        for number, part in enumerate(parts):
            size = part.stop - part.start
            ended = filled < size or call.abandoned or number + 1 == len(parts)
            got = slice(part.start, part.start + filled)
            opening = self._framing.open(keys[got], rooms[got], into[got], taken[got])
            if ended:
                wrong = await opening
            else:
                ahead = parts[number + 1]
                wrong, filled = await together(
                    opening, self._fill(keys[ahead], rooms[ahead], taken[ahead])
                )
            if wrong:
                await self._report({keys[got][index]: one for index, one in wrong.items()})
            good = min(wrong, default=got.stop - got.start)
            sound += good
            if good < size or ended:
                break
        return sound

    async def _fill(
        self, keys: Sequence[BlockKey], into: Sequence[Tensor], taken: Sequence[FrameChecksum]
    ) -> int:
        if not keys:
            return 0
        if isinstance(self.inner, HashesLoads) and taken:
            answer = await self.inner.load_hashed(keys, into, taken)
        else:
            answer = await self.inner.load(keys, into)
        filled = counted(answer, len(keys), self.name, "load")
        if filled < len(keys) and self._framing is not None:
            await self._drop_misfit(keys[filled])
        return filled

    async def _drop_misfit(self, key: BlockKey) -> None:
        """Drop a block that is found but cannot be loaded: it is cut short, or too long.

        It would be found for ever, and never saved anew. Most often it is simply absent.
        """
        if self.codecs.quantized is not None:
            return  # it may be as long as others, who do not quantize, need it
        try:
            with mapped(self.name, "lookup"):
                found = await self._lookup([key])
        except BackendUnavailable:
            return  # the blocks before are good
        if found:
            await self._report({key: BadFrame("of another length")})

    async def _report(self, wrong: Mapping[BlockKey, Recompute]) -> None:
        """Tell of frames that cannot be used, and drop those that nobody can use."""
        bad = [key for key, error in wrong.items() if isinstance(error, BadFrame)]
        for key, error in wrong.items():
            drops = isinstance(error, BadFrame)
            kind = "bad_frame" if drops else "other_codec"
            fate = "bad ({}); it is dropped and computed" if drops else "of no use here ({})"
            count(f"store.{kind}", self._labels)
            warn_once(
                f"{self.name}.{kind}",
                f"{self.name}: block {key.hex()[:16]} is {fate.format(error)}",
            )
        if not bad:
            return
        try:
            with mapped(self.name, "delete"):
                await self.inner.delete(bad)
        except BackendUnavailable as failure:
            # The blocks before are good; these cost another check if they are asked for again.
            warn_once(f"{self.name}.drop", str(failure))

    async def _save(self, blocks: Sequence[StoredBlock], call: Call) -> int:
        framing = self._framing
        if framing is None:
            return await self._store(blocks)
        if isinstance(self.inner, SealsSaves) and not framing.codecs:
            return await self._save_sealed(self.inner, framing, blocks, call)
        saved = 0
        async with framing.lane() as lane:
            # Nobody waits any more for a call whose turn comes after its deadline.
            parts = [] if call.abandoned else list(pieces([block.data for block in blocks]))
            sealed = await framing.seal(blocks[parts[0]] if parts else (), lane, 0)
            for number, part in enumerate(parts):
                last = call.abandoned or number + 1 == len(parts)
                if last:
                    stored = await self._store(sealed)
                else:
                    ahead = blocks[parts[number + 1]]
                    stored, sealed = await together(
                        self._store(sealed), framing.seal(ahead, lane, number + 1)
                    )
                saved += stored
                if stored < part.stop - part.start or last:
                    break
        return saved

    async def _save_sealed(
        self, inner: SealsSaves, framing: Framing, blocks: Sequence[StoredBlock], call: Call
    ) -> int:
        saved = 0
        for part in pieces([block.data for block in blocks]):
            if call.abandoned:
                break
            some = blocks[part]
            answer = await inner.save_sealed(some, framing.address(some))
            stored = counted(answer, len(some), self.name, "save")
            saved += stored
            if stored < len(some):
                break
        return saved

    async def _store(self, blocks: Sequence[StoredBlock]) -> int:
        return counted(await self.inner.save(blocks), len(blocks), self.name, "save")
