"""What the framework puts around every backend: deadline, frames, mapped errors, trace."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

from kvconnect import frame
from kvconnect.backend import Backend, Child, StoredBlock, StoredEntry
from kvconnect.backends.calls import Call, Calls, counted, mapped, together, unopened
from kvconnect.errors import BackendUnavailable, BadFrame, ConfigurationError, RetryLater
from kvconnect.frame import FrameHeader
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout
from kvconnect.trace import count, trace, warn_once

__all__ = ["GuardedBackend"]

T = TypeVar("T")

logger = logging.getLogger("kvconnect")

# One piece is checked while the next is read. Large enough that a piece's fixed cost (a thread hop,
# a query) does not show, small enough that the last check, which nothing overlaps, is short.
_PIECE_NBYTES = 16 << 20
# Hashing less than this takes less time than handing it to a thread.
_INLINE_NBYTES = 256 << 10


class GuardedBackend(Backend):
    """`inner`, safe to call: every call ends in time, and what `load` returns is what was saved.

    Runs on one event loop. Blocks that callers pass have frame buffers of
    ``frame_nbytes(layout.block_nbytes)`` bytes: `save` writes header and padding around the payload
    in place, `load` checks them.

    With `raw` values pass as they are, neither sealed nor checked: for tools that move or examine
    what is stored. Time and errors are guarded all the same.

    Attributes:
        inner: the backend itself.
        name: for messages.
    """

    def __init__(
        self,
        inner: Backend,
        *,
        deadline_s: float = 30.0,
        verify_frames: bool = True,
        raw: bool = False,
    ) -> None:
        if deadline_s <= 0:
            raise ConfigurationError(f"deadline_s={deadline_s}: must be longer than nothing")
        self.inner = inner
        self.name = type(inner).__name__
        self._calls = Calls(self.name, deadline_s)
        self._framed = not inner.device_buffers and not raw
        self._verify = self._framed and verify_frames
        self._layouts: tuple[KvCacheLayout, ...] | None = None
        self._fingerprints: frozenset[bytes] | None = None
        self._hashing = ThreadPoolExecutor(2, thread_name_prefix="kvconnect-frames")
        if self._framed and not verify_frames:
            logger.warning("%s: loaded blocks are not checked (verify_frames is off)", self.name)

    # What the inner backend can do, this one can.
    @property
    def device_buffers(self) -> bool:  # type: ignore[override]
        """As `inner` says."""
        return self.inner.device_buffers

    @property
    def enumerable(self) -> bool:  # type: ignore[override]
        """As `inner` says."""
        return self.inner.enumerable

    @property
    def inline(self) -> bool:  # type: ignore[override]
        """As `inner` says."""
        return self.inner.inline

    @property
    def durable(self) -> bool:  # type: ignore[override]
        """As `inner` says."""
        return self.inner.durable

    @property
    def shared(self) -> bool:  # type: ignore[override]
        """As `inner` says."""
        return self.inner.shared

    @property
    def expires(self) -> bool:  # type: ignore[override]
        """As `inner` says."""
        return self.inner.expires

    @property
    def max_value_bytes(self) -> int | None:  # type: ignore[override]
        """As `inner` says."""
        return self.inner.max_value_bytes

    @property
    def variable_length(self) -> bool:  # type: ignore[override]
        """As `inner` says."""
        return self.inner.variable_length

    async def open(self, layouts: Sequence[KvCacheLayout]) -> None:
        """Open `inner`. If this raises, `close` may still be called, or `open` once more.

        Without `layouts`, frames of any layout are loaded, and none can be saved but `raw`.
        """
        with trace("store.open"):
            await self._calls.run("open", lambda _: self.inner.open(layouts))
        self._layouts = tuple(layouts)
        fingerprints = frozenset(layout.fingerprint() for layout in layouts)
        self._fingerprints = fingerprints or None

    async def close(self) -> None:
        """Wait for calls in flight up to the deadline, then close `inner`, within another one.

        Never raises for a store that is gone; the second time does nothing.
        """
        if self._calls.closed:
            return
        await self._calls.drain()
        try:
            with trace("store.close"):
                await self._calls.run("close", lambda _: self.inner.close(), closing=True)
        except (ConfigurationError, RetryLater) as error:
            logger.warning("%s", error)
        self._hashing.shutdown(wait=False)

    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        """How many leading `keys` are present, within the deadline. Changes nothing but recency."""
        self._opened()
        with trace("store.lookup", blocks=len(keys)) as span:
            answer = await self._calls.run("lookup", lambda _: self.inner.lookup(keys))
            found = counted(answer, len(keys), self.name, "lookup")
            span.set(found=found)
        return found

    async def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        """Fill `into` with the frames of `keys`; return how many leading ones are filled and sound.

        A damaged or foreign frame ends the run, is deleted from the store and counted
        (``store.bad_frame``). Hashing happens on threads of its own.

        Raises:
            BackendTimeout: `into` belongs to the call until `pending` is done.
            BackendUnavailable: all of `into` is undefined; nothing touches it any more.
        """
        self._opened()
        with trace("store.load", blocks=len(keys)) as span:
            loaded = await self._calls.run(
                "load", lambda call: self._load(keys, into, call), holds_buffers=True
            )
            span.set(loaded=loaded, bytes=sum(buffer.numel() for buffer in into[:loaded]))
        return loaded

    async def save(self, blocks: Sequence[StoredBlock]) -> int:
        """Seal the frames in ``block.data``, in place, and store them; return how many are stored.

        Raises:
            BackendTimeout: the buffers belong to the call until `pending` is done.
            BackendUnavailable: each block is stored wholly or not at all.
        """
        self._opened()
        with trace("store.save", blocks=len(blocks)) as span:
            saved = await self._calls.run(
                "save", lambda call: self._save(blocks, call), holds_buffers=True
            )
            span.set(saved=saved, bytes=sum(block.data.numel() for block in blocks[:saved]))
        return saved

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Forget `keys`, within the deadline."""
        self._opened()
        with trace("store.delete", blocks=len(keys)):
            await self._calls.run("delete", lambda _: self.inner.delete(keys))

    async def children(self, key: BlockKey | None) -> Sequence[Child]:
        """The stored blocks whose parent is `key`, within the deadline."""
        self._opened()
        with trace("store.children"):
            return await self._calls.run("children", lambda _: self.inner.children(key))

    async def scan(self) -> AsyncIterator[StoredEntry]:
        """Everything that is stored; each step within the deadline."""
        self._opened()
        entries = aiter(self.inner.scan())

        async def following(_: Call) -> StoredEntry | None:
            return await anext(entries, None)

        while (entry := await self._calls.run("scan", following)) is not None:
            yield entry

    async def stats(self) -> Mapping[str, float]:
        """Numbers about the store, and ``abandoned``: calls past their deadline that still run."""
        self._opened()
        numbers = await self._calls.run("stats", lambda _: self.inner.stats())
        return {**numbers, "abandoned": self._calls.abandoned}

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

    async def _load(self, keys: Sequence[BlockKey], into: Sequence[Tensor], call: Call) -> int:
        if not self._verify:
            return await self._fill(keys, into)
        sound = 0
        pieces = list(_pieces(into))
        filled = await self._fill(keys[pieces[0]], into[pieces[0]]) if pieces else 0
        for number, piece in enumerate(pieces):
            size = piece.stop - piece.start
            ended = filled < size or call.abandoned or number + 1 == len(pieces)
            ahead = slice(0, 0) if ended else pieces[number + 1]
            got = slice(piece.start, piece.start + filled)
            good, filled = await together(
                self._check(keys[got], into[got]), self._fill(keys[ahead], into[ahead])
            )
            sound += good
            if good < size or ended:
                break
        return sound

    async def _fill(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        if not keys:
            return 0
        return counted(await self.inner.load(keys, into), len(keys), self.name, "load")

    async def _check(self, keys: Sequence[BlockKey], frames: Sequence[Tensor]) -> int:
        bad = await self._hash(frames, lambda: self._bad_frames(keys, frames))
        if not bad:
            return len(keys)
        await self._drop({keys[index]: error for index, error in bad.items()})
        return min(bad)

    def _bad_frames(
        self, keys: Sequence[BlockKey], frames: Sequence[Tensor]
    ) -> dict[int, BadFrame]:
        # All of them, though the first one ends the run: each is dropped, so that what is saved
        # next takes its place.
        bad: dict[int, BadFrame] = {}
        for index, (key, data) in enumerate(zip(keys, frames, strict=True)):
            try:
                frame.check(data, key, self._fingerprints)
            except BadFrame as error:
                bad[index] = error
        return bad

    async def _drop(self, bad: Mapping[BlockKey, BadFrame]) -> None:
        for key, error in bad.items():
            count("store.bad_frame")
            warn_once(
                f"{self.name}.bad_frame",
                f"{self.name}: block {key.hex()[:16]} is bad ({error}); it is dropped and computed",
            )
        try:
            with mapped(self.name, "delete"):
                await self.inner.delete(list(bad))
        except BackendUnavailable as failure:
            # The blocks before are good; these cost another check if they are asked for again.
            warn_once(f"{self.name}.drop", str(failure))

    async def _save(self, blocks: Sequence[StoredBlock], call: Call) -> int:
        if not self._framed:
            return counted(await self.inner.save(blocks), len(blocks), self.name, "save")
        pieces = list(_pieces([block.data for block in blocks]))
        saved = 0
        await self._seal(blocks[pieces[0]] if pieces else ())
        for number, piece in enumerate(pieces):
            last = call.abandoned or number + 1 == len(pieces)
            ahead = () if last else blocks[pieces[number + 1]]
            stored, _ = await together(self._store(blocks[piece]), self._seal(ahead))
            saved += stored
            if stored < piece.stop - piece.start or last:
                break
        return saved

    async def _store(self, blocks: Sequence[StoredBlock]) -> int:
        return counted(await self.inner.save(blocks), len(blocks), self.name, "save")

    async def _seal(self, blocks: Sequence[StoredBlock]) -> int:
        await self._hash([block.data for block in blocks], lambda: self._seal_now(blocks))
        return len(blocks)

    def _seal_now(self, blocks: Sequence[StoredBlock]) -> None:
        layouts = self._opened()
        for block in blocks:
            if not 0 <= block.group < len(layouts):
                raise ConfigurationError(
                    f"group={block.group}: {self.name} was opened with {len(layouts)} layouts"
                )
            layout = layouts[block.group]
            tokens = layout.tokens_per_block if block.tokens is None else len(block.tokens)
            fingerprint = layout.fingerprint()
            header = FrameHeader(tokens, layout.block_nbytes, fingerprint, block.key)
            frame.seal(block.data, header)

    async def _hash(self, frames: Sequence[Tensor], work: Callable[[], T]) -> T:
        if sum(data.numel() for data in frames) <= _INLINE_NBYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._hashing, work)


def _pieces(buffers: Sequence[Tensor]) -> Iterator[slice]:
    """Slices over `buffers` of about `_PIECE_NBYTES` each."""
    start = nbytes = 0
    for index, buffer in enumerate(buffers):
        nbytes += buffer.numel()
        if nbytes >= _PIECE_NBYTES or index + 1 == len(buffers):
            yield slice(start, index + 1)
            start, nbytes = index + 1, 0
