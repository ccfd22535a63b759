"""Values of any kind in a store that takes nothing but frames."""

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

__all__ = ["FramedValues"]


class FramedValues(Backend):
    """`inner`, each value of it in a frame: for stores that drop what is none, as tiered ones do.

    The kit stores values of its own, of any length.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        # A frame is as long as its value says.
        self.capabilities = replace(inner.capabilities.wrapped(), variable_length=False)

    async def open(self, layouts: Sequence[KvCacheLayout], access: Access = "store") -> None:
        """With no layouts: frames are of any length."""
        await self.inner.open([], access=access)

    async def close(self) -> None:
        """Close `inner`."""
        await self.inner.close()

    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        """As `inner` says."""
        return await self.inner.lookup(keys)

    async def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        """Fill `into` with values that are exactly so long."""
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
        """Store a copy of each value, in a frame."""
        return await self.inner.save([_framed(block) for block in blocks])

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Forget `keys`."""
        await self.inner.delete(keys)

    async def children(self, key: BlockKey | None) -> Sequence[Child]:
        """As `inner` lists them."""
        return await self.inner.children(key)

    async def scan(self) -> AsyncIterator[StoredEntry]:
        """What `inner` lists, each with the length of its value; each is loaded for that."""
        async for entry in self.inner.scan():
            data = torch.empty(entry.nbytes, dtype=torch.uint8)
            if await self.inner.load([entry.key], [data]):
                nbytes = _value_nbytes(data, entry.key)
                if nbytes is not None:
                    yield replace(entry, nbytes=nbytes)

    async def stats(self) -> Mapping[str, float]:
        """As `inner` says."""
        return await self.inner.stats()


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
