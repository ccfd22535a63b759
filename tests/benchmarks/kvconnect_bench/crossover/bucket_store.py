"""A store in memory whose answers come at a given rate."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from torch import Tensor

from kvconnect.backend import Backend, Capabilities, StoredBlock
from kvconnect.keys import BlockKey

# A shorter sleep takes longer than it should.
_SHORTEST_S = 0.002


class BucketStore(Backend):
    """Holds blocks, and sends those of all loads together at `bytes_per_s`.

    Blocks of several calls take turns, as on one link. Each call waits for its first byte first.

    Args:
        frames: the stored blocks, shared by stores of several engines.

    Attributes:
        bytes_per_s: the rate.
        first_byte_s: from a call to its first byte.
        running: calls that have not ended.
    """

    capabilities = Capabilities(enumerable=False)

    def __init__(self, frames: dict[BlockKey, Tensor]) -> None:
        self.bytes_per_s = float("inf")
        self.first_byte_s = 0.0
        self.running = 0
        self._frames = frames
        self._free_at = 0.0

    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        """Returns how many leading keys are there."""
        return next((n for n, key in enumerate(keys) if key not in self._frames), len(keys))

    async def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        """Fills `into`, a block after the other, at the store's rate."""
        self.running += 1
        try:
            if self.first_byte_s:
                await asyncio.sleep(self.first_byte_s)
            for number, (key, buffer) in enumerate(zip(keys, into, strict=True)):
                frame = self._frames.get(key)
                if frame is None:
                    return number
                await self._send(frame.numel())
                buffer.copy_(frame)
            return len(keys)
        finally:
            self.running -= 1

    async def save(self, blocks: Sequence[StoredBlock]) -> int:
        """Keeps copies of `blocks`, at once."""
        for block in blocks:
            if block.key not in self._frames:
                self._frames[block.key] = block.data.clone()
        return len(blocks)

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Drops the blocks of `keys`."""
        for key in keys:
            self._frames.pop(key, None)

    async def _send(self, nbytes: int) -> None:
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now) + nbytes / self.bytes_per_s
        if self._free_at > now + _SHORTEST_S:
            await asyncio.sleep(self._free_at - now)
