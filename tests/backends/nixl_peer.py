"""An instance with a ``nixl:`` store in a process of its own, and what another sees of it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import torch
from commanded import Commanded

from kvconnect.backend import Backend, Capabilities, StoredBlock
from kvconnect.backends import open_backend
from kvconnect.keys import BlockKey
from kvconnect.testing import BlockMaker
from kvconnect.transfer.control.keyed import GrantKeys
from kvconnect.transfer.control.messages import Hello

Value = tuple[bytes, bytes]


async def eventually(happens: Callable[[], Awaitable[object]], within_s: float = 60.0) -> None:
    """Returns once `happens` says so; fails after `within_s`."""
    end = time.monotonic() + within_s
    while not await happens():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.01)


async def hits(kit, store, keys) -> bool:
    """Whether all of `keys` are loaded; those that are, are right."""
    into = kit.buffers(len(keys))
    loaded = await store.load(keys, into)
    assert all(map(kit.holds, into[:loaded], keys))
    return loaded == len(keys)


class _Instance:
    """What runs in the process: an answer for each command."""

    def __init__(self, store: Backend) -> None:
        self._store = store

    async def address(self) -> str:
        return self._store.address

    async def hello(self) -> Hello:
        """What it says of itself to all who connect."""
        return self._store._parts.node.hello()

    async def save(self, values: Sequence[Value]) -> int:
        return await self._store.save([_block(*value) for value in values])

    async def delete(self, keys: Sequence[bytes]) -> None:
        await self._store.delete(keys)

    async def lookup(self, keys: Sequence[bytes]) -> int:
        return await self._store.lookup(keys)

    async def load(self, keys: Sequence[bytes], nbytes: int) -> list[bytes]:
        into = [torch.empty(nbytes, dtype=torch.uint8) for _ in keys]
        loaded = await self._store.load(keys, into)
        return [one.numpy().tobytes() for one in into[:loaded]]

    async def stats(self) -> dict[str, float]:
        return dict(await self._store.stats())

    async def spoil(self, key: bytes, at: int) -> None:
        """Changes a byte of a stored block, as memory that is broken would."""
        blocks = self._store._parts.blocks
        block = blocks.index.get(BlockKey(key))
        next(blocks.region.views(block.units, block.nbytes))[at] ^= 1

    async def lie(self, kind: str) -> None:
        """From now on this instance grants what it should not; empty: it does no more."""
        publisher = self._store._parts.node._publisher
        vars(publisher).pop("_place", None)
        if not kind:
            return
        right = publisher._place

        def place(blocks: Any, claim: Any) -> Any:
            grant = right(blocks, claim)

            def lying(epoch: int, lease_s: float) -> GrantKeys:
                told = grant(epoch, lease_s)
                lies = {
                    "digests": {"digests": tuple(one ^ 1 for one in told.digests)},
                    "no digests": {"digests": ()},
                    # Of other blocks, or of none.
                    "units": {"units": tuple(reversed(told.units))},
                    "outside": {"units": tuple(one + (1 << 20) for one in told.units)},
                    "region": {"region": 7},
                }
                return told.model_copy(update=lies[kind])

            return lying

        publisher._place = place

    async def cpu_seconds(self) -> float:
        times = os.times()
        return times.user + times.system


def _block(key: bytes, value: bytes) -> StoredBlock:
    data = torch.from_numpy(np.frombuffer(bytearray(value), np.uint8))
    return StoredBlock(BlockKey(key), data)


async def _opened(url: str) -> _Instance:
    store = open_backend(url).inner
    await store.open([BlockMaker.layout])
    return _Instance(store)


class NixlPeer(Commanded):
    """Starts an instance; `ask` calls a method of it there."""

    def __init__(self, url: str) -> None:
        super().__init__(_opened, url)
        self.address: str = self.ask("address")

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def save(self, blocks: Sequence[StoredBlock]) -> int:
        return self.ask("save", [(one.key, one.data.numpy().tobytes()) for one in blocks])


class Across(Backend):
    """What an instance sees of another: all is saved by the other one, and found from here."""

    capabilities = Capabilities(variable_length=True)

    def __init__(self, near: Backend, far: Any) -> None:
        self.near = near
        self._far = far

    async def open(self, layouts, access="store"):
        await self.near.open(layouts, access)

    async def close(self):
        await self.near.close()

    async def lookup(self, keys):
        return await self.near.lookup(keys)

    async def load(self, keys, into):
        return await self.near.load(keys, into)

    async def save(self, blocks):
        return await asyncio.to_thread(self._far().save, blocks)

    async def delete(self, keys):
        await self.near.delete(keys)
