"""A store in memory behind a token bucket: ``bucket://NAME``, whose rate a test sets.

It is known where this module was imported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvconnect.backend import StoredBlock
from kvconnect.backends import registry
from kvconnect.backends.memory import from_url as memory
from kvconnect.backends.memory.store import MemoryBackend
from kvconnect.backends.url import StoreUrl
from kvconnect.keys import BlockKey
from kvconnect.testing.faults.faulty_backend import FaultyBackend

BUCKETS: dict[str, Bucket] = {}


class Bucket(FaultyBackend):
    """Sends the blocks of all loads together at a rate.

    Attributes:
        bytes_per_s: the rate.
        saved: bytes that came.
    """

    def __init__(self, inner: MemoryBackend) -> None:
        super().__init__(inner)
        self.bytes_per_s = float("inf")
        self.saved = 0
        self._free_at = 0.0

    async def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        """Fills `into` once the bucket has let all of it through."""
        now = asyncio.get_running_loop().time()
        nbytes = sum(one.numel() for one in into)
        self._free_at = max(self._free_at, now) + nbytes / self.bytes_per_s
        await asyncio.sleep(self._free_at - now)
        return await super().load(keys, into)

    async def save(self, blocks: Sequence[StoredBlock]) -> int:
        """Keeps `blocks` at once."""
        self.saved += sum(one.data.numel() for one in blocks)
        return await super().save(blocks)


def from_url(url: Any) -> Bucket:
    """A new one, in `BUCKETS` by its name."""
    made = Bucket(memory(StoreUrl.parse("memory:?capacity=256MiB")))
    BUCKETS[url.location] = made
    return made


registry._BUILT_IN["bucket"] = f"{__name__}:from_url"
