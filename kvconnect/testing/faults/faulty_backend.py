"""A wrapper that makes any backend lie, hang, raise, truncate, flip bits or answer late."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Literal, get_args

from torch import Tensor

from kvconnect.backend import Access, Backend, Child, StoredBlock, StoredEntry
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout

BackendFault = Literal[
    "none", "raise", "hang", "late", "lie", "deny", "miscount", "truncate", "flip", "swap"
]
"""The kinds of faults:

- ``raise``: calls raise an error of their own, before or after their work is done.
- ``hang``: calls do not end until the fault is over, and then raise.
- ``late``: calls do their work, buffers included, only after `delay_s`.
- ``lie``: the store reports every block as present, loaded and saved, and writes to no buffer.
- ``deny``: the store reports no block as present, loaded or saved, although it is.
- ``miscount``: answers are impossible numbers.
- ``truncate``: the last half of each loaded buffer is not filled.
- ``flip``: one bit of each loaded buffer is wrong.
- ``swap``: blocks of a load are in each other's buffers; a single one holds zeros."""

BACKEND_FAULTS: tuple[BackendFault, ...] = get_args(BackendFault)


class FaultyBackend(Backend):
    """A wrapper around `inner`, with a fault that can be set and healed at any moment.

    It keeps the one rule whose breach no framework can handle: its coroutines do not end while they
    may still touch their buffers.

    Args:
        seed: the random seed of the choice of bits and errors.
        operations: the operations that are affected.

    Attributes:
        inner: the backend itself.
        fault: the present fault; set it with `set`.
        delay_s: seconds of delay with ``late``.
        hits: the number of affected calls so far.
    """

    def __init__(
        self,
        inner: Backend,
        *,
        seed: int = 0,
        delay_s: float = 0.05,
        operations: Collection[str] = ("lookup", "load", "save", "delete", "children"),
    ) -> None:
        self.inner = inner
        self.capabilities = inner.capabilities.wrapped()
        self.fault: BackendFault = "none"
        self.delay_s = delay_s
        self.hits = 0
        self._operations = frozenset(operations)
        self._random = random.Random(seed)
        self._healed = asyncio.Event()
        self._open = False

    def set(self, fault: BackendFault) -> None:
        """Sets `fault`; calls that hang end with an error."""
        self.fault = fault
        self._healed.set()
        self._healed = asyncio.Event()

    def heal(self) -> None:
        """Ends the fault."""
        self.set("none")

    async def open(self, layouts: Sequence[KvCacheLayout], access: Access = "store") -> None:
        """Opens `inner`, unless it is open."""
        if not self._open:
            await self.inner.open(layouts, access=access)
            self._open = True

    async def close(self) -> None:
        """Ends calls that hang, then closes `inner`."""
        self.heal()
        self._open = False
        await self.inner.close()

    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        """Calls `inner`, with the fault."""
        fault = await self._begin("lookup")
        found = await self.inner.lookup(keys)
        return self._count(fault, found, len(keys))

    async def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        """Calls `inner`, with the fault."""
        fault = await self._begin("load")
        if fault == "lie":
            return len(keys)
        loaded = self._count(fault, await self.inner.load(keys, into), len(keys))
        if fault in {"truncate", "flip", "swap"}:
            self._damage(fault, into[:loaded])
        return loaded

    async def save(self, blocks: Sequence[StoredBlock]) -> int:
        """Calls `inner`, with the fault."""
        fault = await self._begin("save")
        if fault == "lie":
            return len(blocks)
        return self._count(fault, await self.inner.save(blocks), len(blocks))

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Calls `inner`, with the fault."""
        if await self._begin("delete") != "lie":
            await self.inner.delete(keys)

    async def children(self, key: BlockKey | None) -> Sequence[Child]:
        """Calls `inner`, with the fault."""
        fault = await self._begin("children")
        return () if fault in {"lie", "deny"} else await self.inner.children(key)

    def scan(self) -> AsyncIterator[StoredEntry]:
        """Calls `inner`."""
        return self.inner.scan()

    async def describe(self, keys: Sequence[BlockKey]) -> Sequence[StoredEntry | None]:
        """Calls `inner`."""
        return await self.inner.describe(keys)

    async def pin(self, keys: Sequence[BlockKey], until: float | None) -> Sequence[bool]:
        """Calls `inner`."""
        return await self.inner.pin(keys, until)

    async def stats(self) -> Mapping[str, float]:
        """Calls `inner`."""
        return await self.inner.stats()

    def register(self, region: Tensor) -> None:
        """Calls `inner`."""
        self.inner.register(region)

    async def _begin(self, operation: str) -> BackendFault:
        if self.fault == "none" or operation not in self._operations:
            return "none"
        self.hits += 1
        fault = self.fault
        if fault == "raise":
            kinds = (ConnectionResetError, ValueError, KeyError, TimeoutError, RuntimeError)
            raise self._random.choice(kinds)("this store fails on purpose")
        if fault == "hang":
            await self._healed.wait()
            raise ConnectionResetError("this store hung on purpose")
        if fault == "late":
            await asyncio.sleep(self.delay_s)
        return fault

    def _count(self, fault: BackendFault, count: int, limit: int) -> int:
        if fault == "lie":
            return limit
        if fault == "deny":
            return 0
        if fault == "miscount":
            return self._random.choice((-1, limit + 1))
        return count

    def _damage(self, fault: BackendFault, loaded: Sequence[Tensor]) -> None:
        if fault == "swap" and len(loaded) > 1:
            first = loaded[0].clone()
            for one, following in pairwise(loaded):
                one[: following.numel()].copy_(following[: one.numel()])
            loaded[-1][: first.numel()].copy_(first[: loaded[-1].numel()])
            return
        for buffer in loaded:
            if fault == "flip" and buffer.numel():
                buffer[self._random.randrange(buffer.numel())] ^= 1 << self._random.randrange(8)
            elif fault == "truncate":
                buffer[buffer.numel() // 2 :] = 0
            elif fault == "swap":
                buffer.zero_()
