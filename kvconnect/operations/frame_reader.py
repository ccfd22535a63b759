"""Reads frames out of a store one batch ahead, for commands that read all of them."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvconnect import frame
from kvconnect.backend import Backend, StoredEntry
from kvconnect.errors import BackendTimeout, BackendUnavailable, BadFrame, RetryLater

_BATCH_NBYTES = 16 << 20
_BATCH_BLOCKS = 256
_LONGEST = 1 << 30
_EMPTY = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class ReadFrame:
    """A stored block as it was read.

    Attributes:
        entry: the store's listing of it.
        data: the frame, in memory that is reused for the next batch but one.
        problem: the damage of the frame; empty: it is sound.
        gone: the block was listed, but is no longer stored.
    """

    entry: StoredEntry
    data: Tensor = _EMPTY
    problem: str = ""
    gone: bool = False


async def read_frames(
    store: Backend, entries: AsyncIterator[StoredEntry]
) -> AsyncIterator[list[ReadFrame]]:
    """Yields the frames of `entries`, read and checked, in batches of some 16 MiB.

    While the caller works on a batch, the next one is read; a batch's data is valid until the
    caller continues the iteration. Memory is used for two batches only.

    Raises:
        BackendUnavailable: the store as a whole does not answer.
    """
    reader = _Reader(store, entries)
    arenas = [_Arena(), _Arena()]
    reading = asyncio.create_task(reader.read(arenas[0]))
    try:
        while batch := await reading:
            arenas.reverse()
            reading = asyncio.create_task(reader.read(arenas[0]))
            yield batch
    finally:
        # Its buffers are in use until it ends.
        if not reading.done():
            await asyncio.wait({reading})
        if not reading.cancelled():
            reading.exception()


class _Arena:
    """The page-aligned memory of one batch, as large as the largest batch so far."""

    def __init__(self) -> None:
        self._whole = _EMPTY

    def buffers(self, sizes: Sequence[int]) -> list[Tensor]:
        aligned = [-(-size // frame.ALIGNMENT) * frame.ALIGNMENT for size in sizes]
        total = sum(aligned)
        if self._whole.numel() < total:
            self._whole = _EMPTY
            self._whole = torch.frombuffer(mmap.mmap(-1, total), dtype=torch.uint8)
        found, start = [], 0
        for size, step in zip(sizes, aligned, strict=True):
            found.append(self._whole[start : start + size])
            start += step
        return found


class _Reader:
    def __init__(self, store: Backend, entries: AsyncIterator[StoredEntry]) -> None:
        self._store = store
        self._entries = entries
        self._ahead: StoredEntry | None = None
        self._failure: RetryLater | None = None

    async def read(self, arena: _Arena) -> list[ReadFrame]:
        """Returns the next batch; empty at the end."""
        entries = await self._next_entries()
        sound = [entry for entry in entries if 0 < entry.nbytes <= _LONGEST]
        buffers = arena.buffers([entry.nbytes for entry in sound])
        frames = await self._load(sound, buffers)
        frames = await asyncio.to_thread(_check_all, frames)
        for at, one in enumerate(frames):
            if one.problem:
                frames[at] = await self._look_again(one)
        odd = [entry for entry in entries if not 0 < entry.nbytes <= _LONGEST]
        return frames + [
            ReadFrame(entry, problem=f"it is listed with {entry.nbytes} bytes") for entry in odd
        ]

    async def _next_entries(self) -> list[StoredEntry]:
        entries: list[StoredEntry] = []
        nbytes = 0
        while len(entries) < _BATCH_BLOCKS:
            entry = self._ahead or await self._next(told=not entries)
            self._ahead = None
            if entry is None:
                break
            nbytes += entry.nbytes
            if entries and nbytes > _BATCH_NBYTES:
                self._ahead = entry
                break
            entries.append(entry)
        return entries

    async def _next(self, *, told: bool) -> StoredEntry | None:
        """Returns the next entry, or ``None``.

        Raises an error of the listing only if `told` is true.
        """
        if self._failure is None:
            try:
                return await anext(self._entries, None)
            except RetryLater as error:
                self._failure = error
        if told:
            raise self._failure
        return None

    async def _load(
        self, entries: Sequence[StoredEntry], buffers: Sequence[Tensor]
    ) -> list[ReadFrame]:
        frames: list[ReadFrame] = []
        while len(frames) < len(entries):
            at = len(frames)
            keys = [entry.key for entry in entries[at:]]
            try:
                got = await self._store.load(keys, buffers[at:])
            except BackendTimeout:
                raise  # the running call owns the buffers now
            except BackendUnavailable:
                got = 0
            ready = zip(entries[at : at + got], buffers[at:], strict=False)
            frames += [ReadFrame(entry, data) for entry, data in ready]
            if len(frames) < len(entries):
                frames.append(await self._load_one(entries[at + got], buffers[at + got]))
        return frames

    async def _load_one(self, entry: StoredEntry, buffer: Tensor) -> ReadFrame:
        try:
            if await self._store.load([entry.key], [buffer]):
                return ReadFrame(entry, buffer)
            if not await self._store.lookup([entry.key]):
                return ReadFrame(entry, gone=True)
        except BackendTimeout:
            raise
        except BackendUnavailable as error:
            await self._store.stats()  # raises if the store does not answer
            return ReadFrame(entry, problem=f"it cannot be read ({error})")
        return ReadFrame(entry, problem="it is listed, and cannot be loaded")

    async def _look_again(self, bad: ReadFrame) -> ReadFrame:
        """Reads a damaged block again: it may have been replaced during the first read."""
        if not bad.data.numel():
            return bad
        again = await self._load_one(bad.entry, bad.data)
        return again if again.gone or again.problem else (_check_all([again]))[0]


def _check_all(frames: Sequence[ReadFrame]) -> list[ReadFrame]:
    return [one if one.gone or one.problem else _checked(one) for one in frames]


def _checked(one: ReadFrame) -> ReadFrame:
    try:
        frame.check(one.data, one.entry.key, None)
    except BadFrame as error:
        return replace(one, problem=str(error))
    return one
