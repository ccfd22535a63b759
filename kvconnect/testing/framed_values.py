"""Stores values of any kind in a store that takes only frames."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvconnect import frame
from kvconnect.backend import Access, Backend, Child, StoredBlock, StoredEntry
from kvconnect.errors import BadFrame
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout


class FramedValues(Backend):
    """A wrapper that puts each value of `inner` in a frame.

    Stores that drop other values, such as tiered ones, need it, because the kit stores values of
    any length that are no frames.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        # A frame's length is that of its value.
        self.capabilities = replace(inner.capabilities.wrapped(), variable_length=False)

    async def open(self, layouts: Sequence[KvCacheLayout], access: Access = "store") -> None:
        """Opens `inner` without layouts: frames are of any length."""
        await self.inner.open([], access=access)

    async def close(self) -> None:
        """Closes `inner`."""
        await self.inner.close()

    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        """Calls `inner`."""
        return await self.inner.lookup(keys)

    async def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        """Fills `into` with values of exactly that length."""
        frames = [
            torch.empty(frame.frame_nbytes(buffer.numel()), dtype=torch.uint8) for buffer in into
        ]
        loaded = await self.inner.load(keys, frames)
        for number, (key, data, buffer) in enumerate(zip(keys, frames, into, strict=True)):
            if number == loaded or _value_nbytes(data, key) != buffer.numel():
                return number
            buffer.copy_(frame.payload(data, buffer.numel()))
        return loaded

    async def save(self, blocks: Sequence[StoredBlock]) -> int:
        """Stores a copy of each value, in a frame."""
        return await self.inner.save([_framed(block) for block in blocks])

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Deletes `keys`."""
        await self.inner.delete(keys)

    async def children(self, key: BlockKey | None) -> Sequence[Child]:
        """Calls `inner`."""
        return await self.inner.children(key)

    async def scan(self) -> AsyncIterator[StoredEntry]:
        """Yields the entries of `inner`, each loaded to learn the length of its value."""
        async for entry in self.inner.scan():
            if (found := await self._of_value(entry)) is not None:
                yield found

    async def describe(self, keys: Sequence[BlockKey]) -> Sequence[StoredEntry | None]:
        """Returns what `scan` would yield for each of `keys`."""
        entries = await self.inner.describe(keys)
        return [None if one is None else await self._of_value(one) for one in entries]

    async def pin(self, keys: Sequence[BlockKey], until: float | None) -> Sequence[bool]:
        """Calls `inner`."""
        return await self.inner.pin(keys, until)

    async def stats(self) -> Mapping[str, float]:
        """Calls `inner`."""
        return await self.inner.stats()

    async def _of_value(self, entry: StoredEntry) -> StoredEntry | None:
        data = torch.empty(entry.nbytes, dtype=torch.uint8)
        if not await self.inner.load([entry.key], [data]):
            return None
        nbytes = _value_nbytes(data, entry.key)
        return None if nbytes is None else replace(entry, nbytes=nbytes)


def _value_nbytes(data: Tensor, key: BlockKey) -> int | None:
    try:
        return frame.check(data, key, None).payload_nbytes
    except BadFrame:
        return None


def _framed(block: StoredBlock) -> StoredBlock:
    nbytes = block.data.numel()
    data = torch.empty(frame.frame_nbytes(nbytes), dtype=torch.uint8)
    frame.payload(data, nbytes).copy_(block.data)
    frame.seal(data, frame.FrameHeader(0, nbytes, bytes(16), block.key))
    return replace(block, data=data)
