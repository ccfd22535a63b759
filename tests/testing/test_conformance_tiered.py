"""``tiered:`` keeps the contract: memory before disk, in frames, which is what its tiers take."""

from __future__ import annotations

from typing import ClassVar
from urllib.parse import quote

import torch

from kvconnect import frame
from kvconnect.backend import Backend, StoredBlock
from kvconnect.backends import open_backend
from kvconnect.errors import BadFrame
from kvconnect.testing import BackendConformance


class Framing(Backend):
    """Puts each value into a frame, so that values of any length can be stored."""

    def __init__(self, inner):
        self.inner = inner

    enumerable = property(lambda self: self.inner.enumerable)
    durable = property(lambda self: self.inner.durable)
    shared = property(lambda self: self.inner.shared)
    expires = property(lambda self: self.inner.expires)

    async def open(self, layouts):
        await self.inner.open([])

    async def close(self):
        await self.inner.close()

    async def lookup(self, keys):
        return await self.inner.lookup(keys)

    async def load(self, keys, into):
        frames = [torch.empty(frame.frame_nbytes(len(b)), dtype=torch.uint8) for b in into]
        loaded = await self.inner.load(keys, frames)
        for number, (key, data, buffer) in enumerate(zip(keys, frames, into, strict=True)):
            try:
                header = frame.check(data, key, None) if number < loaded else None
            except BadFrame:
                header = None
            if header is None or header.payload_nbytes != len(buffer):
                return number
            buffer.copy_(frame.payload(data, len(buffer)))
        return loaded

    async def save(self, blocks):
        return await self.inner.save([self.framed(block) for block in blocks])

    @staticmethod
    def framed(block):
        nbytes = len(block.data)
        data = torch.empty(frame.frame_nbytes(nbytes), dtype=torch.uint8)
        frame.payload(data, nbytes).copy_(block.data)
        frame.seal(data, frame.FrameHeader(0, nbytes, bytes(16), block.key))
        return StoredBlock(block.key, data, block.parent, block.tokens, block.priority)

    async def delete(self, keys):
        await self.inner.delete(keys)

    async def children(self, key):
        return await self.inner.children(key)

    async def scan(self):
        async for entry in self.inner.scan():
            yield entry

    async def stats(self):
        return await self.inner.stats()


class TestTiered(BackendConformance):
    keeps_copies = True  # in the memory of each process

    skip: ClassVar = {
        "capabilities.scan": "sizes are those of the frames around what is saved",
        "resources.no_descriptors": "a tier that fails counts as empty: what it has may be dropped",
    }

    def make_backend(self):
        disk = f"disk://{self.tmp_path}/store?capacity=1GiB"
        tiers = ",".join(quote(tier, safe="") for tier in ("memory:?capacity=64MiB", disk))
        return Framing(open_backend(f"tiered:?tiers={tiers}").inner)
