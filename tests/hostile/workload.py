"""What is done with a store under attack, what must hold of it, and what came of it.

Whatever a medium or a store does: no byte is reported as loaded that was not saved, nothing is
written beside a buffer, every call ends in time, with a result or with one of our errors; and once
the attack is over, a prompt is saved again and found.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from kvconnect.backend import Backend
from kvconnect.errors import ConfigurationError, RetryLater
from kvconnect.testing import BlockMaker

TALLY = "KVCONNECT_HOSTILE_TALLY"
"""Environment variable: a file that the counts are appended to."""

DEADLINE_S = 1.0
_NUM_BLOCKS = 12
_PATIENT_S = 60.0
# Not what a call may take, which the kit measures, but what no machine is too busy for.
_HANG_S = 30.0
_USES = "uses at most until all was found again"


class Workload:
    """Blocks, what is done with them, and how that ended.

    Args:
        attack: its name; it and the number of the try are all that chance depends on.
        make: makes a store that is not open yet, with so many seconds for each call.

    Attributes:
        counts: of calls by how they ended, of blocks loaded, and what an attack counts.
    """

    def __init__(self, attack: str, make: Callable[[float], Backend]) -> None:
        self.attack = attack
        self.kit = BlockMaker()
        self.keys = self.kit.keys(attack, count=_NUM_BLOCKS)
        self.counts: Counter[str] = Counter()
        self._make = make

    def tries(self, number: int) -> Iterator[random.Random]:
        """The source of chance of each try; tells what came of them at the end."""
        for this in range(number):
            yield random.Random(f"{self.attack} {this}")
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        counts = f"{number} tries, {counts}"
        print(f"{self.attack}: {counts}")
        if path := os.environ.get(TALLY):
            with Path(path).open("a") as file:
                file.write(f"{self.attack}: {counts}\n")

    async def suffer(self, chance: random.Random, during: Callable[[], None] | None = None) -> None:
        """Use a store once in all ways; `during` is called when it is open."""
        store = self._make(DEADLINE_S)
        try:
            if not await self._call(store.open([self.kit.layout])):
                return
            if during is not None:
                during()
            await self._use(store, chance)
        finally:
            await self._call(store.close())

    async def expect_recovery(self) -> None:
        """Without the attack each use saves what is missing, and soon one finds all.

        A bad block is found out when those before it are good, so each may take a use of its own.
        """
        for uses in range(len(self.keys) + 2):
            store = self._make(_PATIENT_S)
            await store.open([self.kit.layout])
            try:
                loaded = await self._load(store, self.keys[: await store.lookup(self.keys)])
                if loaded == len(self.keys):
                    self.counts[_USES] = max(self.counts[_USES], uses)
                    return
                await store.save(self.kit.chain(self.keys)[loaded:])
            finally:
                await store.close()
        raise AssertionError("the prompt is never found again")

    async def _use(self, store: Backend, chance: random.Random) -> None:
        more = self.kit.keys(self.attack, chance.random(), count=4)
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: store.lookup(self.keys),
            lambda: self._load(store, self.keys),
            lambda: self._load(store, more),
            lambda: store.save(self.kit.chain(self.keys)),
            lambda: store.save(self.kit.chain(more)),
            lambda: store.delete(chance.sample(self.keys, 2)),
            lambda: store.children(chance.choice(self.keys)),
            lambda: store.describe(self.keys),
            lambda: _listed(store),
            store.stats,
        ]
        for call in chance.sample(calls, 6):
            await self._call(call())

    async def _load(self, store: Backend, keys: Sequence[bytes]) -> int:
        into = self.kit.buffers(len(keys))
        loaded = 0
        try:
            loaded = await store.load(keys, into)
        finally:
            assert all(self.kit.margins_whole(buffer) for buffer in into)
            for buffer, key in zip(into[:loaded], keys, strict=False):
                assert self.kit.holds(buffer, key), "a wrong block is reported as loaded"
        self.counts["blocks loaded"] += loaded
        return loaded

    async def _call(self, call: Awaitable[object]) -> bool:
        started = time.monotonic()
        try:
            await call
        except RetryLater:
            self.counts["calls failed"] += 1
            return False
        except ConfigurationError:  # what answers is none of what the URL says
            self.counts["calls refused"] += 1
            return False
        else:
            self.counts["calls answered"] += 1
            return True
        finally:
            assert time.monotonic() - started < _HANG_S, "a call did not end"


async def _listed(store: Backend) -> None:
    # A listing has a deadline for each step, and no end where a server wants none.
    with suppress(TimeoutError):
        async with asyncio.timeout(DEADLINE_S):
            async for _ in store.scan():
                pass
