"""A store whose answers are anything at all: numbers, types, errors, blocks of other keys."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator

import numpy as np
import pytest
import torch
from tier_store import DictTier
from workload import DEADLINE_S, Workload

from kvconnect.backend import Child, StoredEntry
from kvconnect.backends import open_backend
from kvconnect.errors import BackendTimeout, BackendUnavailable, BadFrame, ConfigurationError

FORM = [pytest.param(40, id="quick"), pytest.param(2000, id="long", marks=pytest.mark.slow)]
SHORT_S = DEADLINE_S / 4  # what is in a dictionary is there at once
ANSWERS = [
    None,
    True,
    -1,
    0,
    1,
    3,
    10**9,
    2**70,
    1.0,
    float("nan"),
    "4",
    b"",
    [],
    [1, 2],
    {},
    object(),
    np.int64(2),
    torch.tensor(3),
    NotImplemented,
]
ERRORS = [
    BackendUnavailable("as if"),
    BackendTimeout("as if"),
    BadFrame("as if"),
    ConfigurationError("as if"),
    OSError(5, "as if"),
    RuntimeError("as if"),
    AttributeError("as if"),
    ZeroDivisionError(),
    MemoryError("as if"),
    RecursionError("as if"),
    TimeoutError(),
    StopAsyncIteration(),
    asyncio.CancelledError(),
    ExceptionGroup("as if", [ValueError("as if"), KeyError("as if")]),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "as if"),
]


class Liar(DictTier):
    """Lies as often as `often` says; what it holds is right unless it is told otherwise."""

    def __init__(self, counts):
        super().__init__(enumerable=True, variable_length=True)
        self.often = 0.0
        self.chance = None
        self._counts = counts

    async def _lie(self):
        """Whether to; may raise, or take too long."""
        if self.chance is None or self.chance.random() >= self.often:
            return False
        self._counts["lies"] += 1
        kind = self.chance.random()
        if kind < 0.3:
            raise self.chance.choice(ERRORS)
        if kind < 0.32:
            await asyncio.sleep(1.5 * SHORT_S)
        return True

    def _anything(self):
        return self.chance.choice(ANSWERS)

    async def lookup(self, keys):
        lies = await self._lie()
        return self._anything() if lies else await super().lookup(keys)

    async def load(self, keys, into):
        if not await self._lie():
            return await super().load(keys, into)
        for buffer in into:
            self._scribble(buffer)
        return self.chance.choice([len(keys), len(keys), self._anything()])

    def _scribble(self, buffer):
        others = [block.data for block in self.blocks.values()]
        match self.chance.randrange(4):
            case 0 if others:
                data = self.chance.choice(others)
                nbytes = min(data.numel(), buffer.numel())
                buffer[:nbytes] = data[:nbytes]
                if self.chance.random() < 0.5:
                    buffer[self.chance.randrange(nbytes)] ^= 1
            case 1:
                buffer.fill_(self.chance.randrange(256))
            case 2:
                buffer[:] = torch.from_numpy(
                    np.frombuffer(self.chance.randbytes(buffer.numel()), np.uint8).copy()
                )

    async def save(self, blocks):
        if not await self._lie():
            return await super().save(blocks)
        if self.chance.random() < 0.5:
            await super().save(blocks[: self.chance.randrange(len(blocks) + 1)])
        return self._anything()

    async def delete(self, keys):
        if not await self._lie():
            await super().delete(keys)

    async def children(self, key):
        if not await self._lie():
            return await super().children(key)
        odd = Child(self._anything(), self._anything())
        return self.chance.choice([[odd], [odd] * 300, self._anything()])

    async def scan(self) -> AsyncIterator[StoredEntry]:
        async for entry in super().scan():
            yield self._anything() if await self._lie() else entry

    async def describe(self, keys):
        if not await self._lie():
            return await super().describe(keys)
        return self.chance.choice([self._anything(), [self._anything() for _ in keys]])

    async def stats(self):
        if not await self._lie():
            return await super().stats()
        return self.chance.choice([self._anything(), {"blocks": self._anything()}])


def test_every_call_of_a_store_is_lied_about():
    own = {name for name, _ in inspect.getmembers(Liar, inspect.isfunction)}
    assert {"lookup", "load", "save", "delete", "children", "scan", "describe", "stats"} <= own


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tries", FORM)
async def test_lies_cost_blocks_and_nothing_else(tries):
    liar = None

    def make(deadline_s):
        return open_backend(liar, deadline_s=SHORT_S if deadline_s == DEADLINE_S else deadline_s)

    work = Workload("a store that lies", make)
    for chance in work.tries(tries):
        liar = Liar(work.counts)
        await work.expect_recovery()
        liar.chance, liar.often = chance, chance.choice([0.1, 0.3, 0.7, 1.0])
        await work.suffer(chance)
        liar.often = 0.0
        await work.expect_recovery()
