"""The blocks that wait in memory to be written to a tier: write-behind and promotion."""

from __future__ import annotations

import asyncio
import mmap
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

from kvconnect.backend import StoredBlock
from kvconnect.backends.lanes import Lane
from kvconnect.errors import BackendTimeout, BackendUnavailable, KvConnectError
from kvconnect.keys import BlockKey
from kvconnect.trace import count, warn_once

if TYPE_CHECKING:
    from torch import Tensor

_BATCH_NBYTES = 8 << 20
_BATCH_BLOCKS = 256
# Copying less than this takes less time than handing it to a thread.
_INLINE_NBYTES = 1 << 20


class Backlog:
    """The copies of blocks that wait to be written to one tier, within a number of bytes.

    All methods run on one event loop. Blocks are written in the order of `add`, parents before
    children, one batch after the other. A block that does not fit, or that the tier does not store,
    is dropped and counted (``store.tiered.dropped``): that costs a later hit, nothing else.

    Args:
        name: the tier's name, for messages.
        save: writes a batch to the tier; returns how many leading blocks are stored.
        delete: deletes from the tier, now or later.
        owe: makes the tier delete keys once it answers again.
        ready: waits until the tier can be written to.
        limit: the most bytes of all copies together, including buffers kept for later copies.
    """

    def __init__(
        self,
        name: str,
        *,
        save: Callable[[Sequence[StoredBlock]], Awaitable[int]],
        delete: Callable[[Sequence[BlockKey]], Awaitable[bool]],
        owe: Callable[[Sequence[BlockKey]], None],
        ready: Callable[[], Awaitable[object]],
        limit: int,
    ) -> None:
        self._name = name
        self._save = save
        self._delete = delete
        self._owe = owe
        self._ready = ready
        self._buffers = _Buffers(limit)
        self._queue: deque[StoredBlock] = deque()
        self._known: set[BlockKey] = set()
        self._writing: set[BlockKey] = set()
        self._forgotten: set[BlockKey] = set()
        self._worker: asyncio.Task[None] | None = None
        self._lane: Lane | None = None
        self._closing = False

    def __len__(self) -> int:
        """Returns how many blocks wait or are being written."""
        return len(self._queue) + len(self._writing)

    @property
    def nbytes(self) -> int:
        """The bytes of the copies, and of buffers kept for later copies."""
        return self._buffers.nbytes

    async def add(self, blocks: Iterable[StoredBlock]) -> int:
        """Copies `blocks` to be written in the background; returns how many copies fit.

        When it returns, the caller may reuse the data. Blocks that wait already are skipped.
        """
        copies: list[tuple[StoredBlock, Tensor]] = []
        dropped = 0
        for block in blocks:
            if block.key in self._known or self._closing:
                continue
            buffer = self._buffers.take(block.data.numel())
            if buffer is None:
                dropped += 1
                continue
            self._known.add(block.key)
            copies.append((block, buffer))
        copied = await self._copy(copies)
        for block, buffer in copies:
            if self._closing or not copied or block.key in self._forgotten:
                self._forgotten.discard(block.key)
                self._give_back(replace(block, data=buffer))
            else:
                self._queue.append(replace(block, data=buffer))
        if dropped:
            self._drop(dropped, "too much waits to be written")
        if self._queue and self._worker is None:
            self._worker = asyncio.create_task(self._write_all())
        return len(copies)

    async def _copy(self, copies: Sequence[tuple[StoredBlock, Tensor]]) -> bool:
        """Copies the data of blocks to buffers; returns false if no thread does."""

        def copy() -> None:
            for block, buffer in copies:
                buffer.copy_(block.data)

        if sum(buffer.numel() for _, buffer in copies) <= _INLINE_NBYTES:
            copy()
            return True
        try:
            # No thread of the loop's own: a tier that hangs may hold all of them.
            if self._lane is None:
                self._lane = Lane("kvconnect-backlog", 1)
            await self._lane.run(copy)
        except BackendUnavailable as error:
            self._drop(len(copies), str(error))
            return False
        return True

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Drops waiting `keys`; deletes those that are being written once that has ended."""
        gone = {key for key in keys if key in self._known}
        if not gone:
            return
        # Blocks that are not in the queue are being copied or written.
        self._forgotten |= gone.difference(block.key for block in self._queue)
        kept: deque[StoredBlock] = deque()
        for block in self._queue:
            if block.key in gone:
                self._give_back(block)
            else:
                kept.append(block)
        self._queue = kept

    async def close(self, deadline_s: float) -> None:
        """Writes waiting blocks for up to `deadline_s`, drops the rest and stops the worker.

        Waits for a batch that is being written then, because its buffers are in use.
        """
        worker = self._worker
        if worker is not None:
            await asyncio.wait({worker}, timeout=deadline_s)
        self._closing = True
        if self._queue:
            self._drop(len(self._queue), f"it did not take them within {deadline_s:g} s at close")
            self._queue.clear()
        if worker is not None and not self._writing:
            worker.cancel()  # the worker waits for a tier that does not answer
        if worker is not None:
            await asyncio.wait({worker})
        if self._lane is not None:
            await self._lane.close()
            self._lane.join()
        self._known.clear()
        self._buffers.clear()

    async def _write_all(self) -> None:
        try:
            while self._queue:
                await self._ready()
                await self._write(self._next_batch())
        finally:
            self._worker = None

    def _next_batch(self) -> list[StoredBlock]:
        batch: list[StoredBlock] = []
        nbytes = 0
        while self._queue and len(batch) < _BATCH_BLOCKS:
            nbytes += self._queue[0].data.numel()
            if batch and nbytes > _BATCH_NBYTES:
                break
            batch.append(self._queue.popleft())
        return batch

    async def _write(self, batch: Sequence[StoredBlock]) -> None:
        self._writing = {block.key for block in batch}
        stored = 0
        reason = "it has no room"
        pending: Future[None] | None = None
        try:
            stored = await self._save(batch)
            if again := self._forgotten & self._writing:
                await self._delete(tuple(again))
        except BackendTimeout as error:
            reason, pending = str(error), error.pending
        except KvConnectError as error:
            reason = str(error)
        finally:
            gone = tuple(self._forgotten & self._writing)
            self._forgotten.difference_update(gone)
            self._writing = set()
            if pending is None:
                for block in batch:
                    self._give_back(block)
            else:
                # The call keeps the buffers until it ends; the keys may be added again.
                self._known.difference_update(block.key for block in batch)
                lent = [block.data for block in batch]
                loop = asyncio.get_running_loop()

                def ended() -> None:
                    self._buffers.give_back(lent)
                    if gone:
                        self._owe(gone)

                pending.add_done_callback(lambda _: _soon(loop, ended))
        if stored < len(batch):
            self._drop(len(batch) - stored, reason)

    def _give_back(self, block: StoredBlock) -> None:
        self._known.discard(block.key)
        self._buffers.give_back([block.data])

    def _drop(self, blocks: int, reason: str) -> None:
        count("store.tiered.dropped", blocks=blocks)
        warn_once(
            f"tiered.dropped.{self._name}",
            f"tier {self._name}: {blocks} blocks were not written in the background: {reason}",
        )


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)


class _Buffers:
    """The page-aligned buffers of at most `limit` bytes together; free ones are used again."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._free: dict[int, list[Tensor]] = {}
        self._closed = False
        self.nbytes = 0

    def take(self, nbytes: int) -> Tensor | None:
        """Returns a buffer, or ``None`` if there is no room for it."""
        free = self._free.get(nbytes)
        if free:
            return free.pop()
        while self.nbytes + nbytes > self._limit:
            if not self._discard_one(other_than=nbytes):
                return None
        try:
            # Anonymous maps are page-aligned, so direct I/O can use them.
            whole = mmap.mmap(-1, max(nbytes, 1))
        except OSError:  # the machine has less memory than the limit
            return None
        self.nbytes += nbytes
        import torch

        return torch.frombuffer(whole, dtype=torch.uint8)[:nbytes]

    def give_back(self, buffers: Iterable[Tensor]) -> None:
        """Returns `buffers` to the pool."""
        for buffer in buffers:
            if self._closed:
                self.nbytes -= buffer.numel()
            else:
                self._free.setdefault(buffer.numel(), []).append(buffer)

    def clear(self) -> None:
        """Frees the buffers in the pool, and from now on those that are returned to it."""
        self._closed = True
        for free in self._free.values():
            self.nbytes -= sum(buffer.numel() for buffer in free)
        self._free.clear()

    def _discard_one(self, *, other_than: int) -> bool:
        for nbytes, free in self._free.items():
            if free and nbytes != other_than:
                free.pop()
                self.nbytes -= nbytes
                return True
        return False
