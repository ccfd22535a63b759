"""The values that the benchmark of stores moves: frames of one size, in memory that is cold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvconnect.backend import StoredBlock
from kvconnect.connector.io.access import CALL_NBYTES, LOADS_IN_FLIGHT, SAVES_IN_FLIGHT
from kvconnect.errors import BadFrame
from kvconnect.frame import HEADER_NBYTES, FrameHeader, seal
from kvconnect.kernels.pinned import host_bytes
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout


@dataclass(frozen=True, slots=True)
class StorePlan:
    """The sizes and counts of the benchmark.

    Attributes:
        sizes: the sizes of the values, in bytes; multiples of 4096.
        total_nbytes: the bytes of all values together: more than the processor's caches hold, so
            that every value comes from memory or from the device.
        rounds: number of rounds; the figures are medians.
        puts_in_flight: calls at once, to store; the default is what the connector does.
        gets_in_flight: calls at once, to load; the default is what the connector does.
        batch_nbytes: the bytes of the values of one call; the default is what the connector does.
        lookup_keys: keys of one lookup.
        latencies: calls with one value each, in every round, of which the percentiles are taken.
    """

    sizes: tuple[int, ...] = (2 << 20, 32 << 20)
    total_nbytes: int = 512 << 20
    rounds: int = 5
    puts_in_flight: int = SAVES_IN_FLIGHT
    gets_in_flight: int = LOADS_IN_FLIGHT
    batch_nbytes: int = CALL_NBYTES
    lookup_keys: int = 64
    latencies: int = 16


@dataclass(slots=True, eq=False)
class Payloads:
    """The `count` values of `nbytes` bytes each, and as many buffers to load them into.

    All memory was touched.

    Attributes:
        layout: the layout of blocks whose frames are exactly so long.
        blocks: a chain; `data` are sealed frames of random bytes, page-aligned.
        into: the buffers that they are loaded into.
    """

    nbytes: int
    count: int
    layout: KvCacheLayout = field(init=False)
    blocks: list[StoredBlock] = field(init=False)
    into: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        payload = self.nbytes - HEADER_NBYTES
        self.layout = KvCacheLayout(1, 1, payload // 4, payload // 4, 2, torch.uint8)
        frames = _pages(self.nbytes, self.count)
        self.into = _pages(self.nbytes, self.count)
        generator = np.random.default_rng(self.nbytes)
        self.blocks = []
        parent: BlockKey | None = None
        for number, data in enumerate(frames):
            data.numpy()[:] = np.frombuffer(generator.bytes(self.nbytes), np.uint8)
            name = f"bench {self.nbytes} {number}".encode()
            key = BlockKey(hashlib.blake2b(name, digest_size=32).digest())
            fingerprint = self.layout.fingerprint()
            seal(data, FrameHeader(2, self.layout.block_nbytes, fingerprint, key))
            self.blocks.append(StoredBlock(key, data, parent))
            parent = key

    @property
    def total(self) -> int:
        """The bytes of all values together."""
        return self.nbytes * self.count

    @property
    def keys(self) -> list[BlockKey]:
        """The keys of all blocks."""
        return [block.key for block in self.blocks]

    def asked(self, count: int) -> list[BlockKey]:
        """Returns `count` keys for a lookup, the same ones again and again if there are fewer."""
        return (self.keys * count)[:count]

    def batches(self, nbytes: int) -> Iterator[slice]:
        """Yields the slice of the values of each call of about `nbytes`."""
        step = max(1, nbytes // self.nbytes)
        for start in range(0, self.count, step):
            yield slice(start, min(start + step, self.count))

    def check(self) -> None:
        """Checks that `into` holds the same bytes as `blocks`.

        Raises:
            BadFrame: a store gave back other bytes.
        """
        for block, data in zip(self.blocks, self.into, strict=True):
            if not np.array_equal(block.data.numpy(), data.numpy()):
                raise BadFrame(f"block {block.key.hex()[:16]} came back with other bytes")

    def spoil(self) -> None:
        """Overwrites a byte of every 4 KiB of `into`, so that `check` proves a new load."""
        for data in self.into:
            data.numpy()[:: 1 << 12] = 0xEE


def _pages(nbytes: int, count: int) -> list[Tensor]:
    # In huge pages where there are any, as the connector's staging memory is.
    whole = torch.from_numpy(host_bytes(nbytes * count))
    whole.fill_(1)
    return [whole[start : start + nbytes] for start in range(0, whole.numel(), nbytes)]
