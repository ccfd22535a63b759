"""A store in a dictionary whose answers tests can delay, refuse and falsify; several as one."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace

from kvconnect.backend import Backend, Capabilities, Child, StoredBlock, StoredEntry
from kvconnect.backends.tiered.settings import TieredSettings
from kvconnect.backends.tiered.store import TieredBackend


class DictTier(Backend):
    """`blocks` by key. `hang` names operations that do not end until it is emptied and `go` set.

    Attributes:
        down: every call fails.
        boast: `lookup` says yes to everything.
        room: blocks that it takes.
        before: runs at the start of each call, is given its name and may do anything.
    """

    def __init__(self, room=1 << 30, *, before=None, **capabilities):
        self.capabilities = Capabilities(**capabilities)
        self.blocks = {}
        self.calls = Counter()
        self.asked = []
        self.loads = []
        self.hang = set()
        self.go = asyncio.Event()
        self.down = False
        self.boast = False
        self.room = room
        self.before = before
        self.open_error = None
        self.is_open = False

    def keys(self):
        return set(self.blocks)

    def put(self, *blocks):
        for block in blocks:
            self.blocks[block.key] = replace(block, data=block.data.clone())

    def value(self, key):
        return self.blocks[key].data

    def hold(self, key, data):
        self.blocks[key] = StoredBlock(key, data)

    def recover(self):
        self.hang.clear()
        self.down = False
        self.go.set()

    async def _begin(self, name):
        self.calls[name] += 1
        if self.before is not None:
            await self.before(name)
        if name in self.hang:
            await self.go.wait()
        if self.down:
            raise ConnectionError("the store is gone")

    async def open(self, layouts, access="store"):
        await self._begin("open")
        if self.open_error is not None:
            raise self.open_error
        self.is_open = True

    async def close(self):
        await self._begin("close")
        self.is_open = False

    async def lookup(self, keys):
        self.asked.append(list(keys))
        await self._begin("lookup")
        if self.boast:
            return len(keys)
        return next((at for at, key in enumerate(keys) if key not in self.blocks), len(keys))

    async def load(self, keys, into):
        await self._begin("load")
        for number, (key, buffer) in enumerate(zip(keys, into, strict=True)):
            block = self.blocks.get(key)
            if block is None or block.data.numel() > buffer.numel():
                return number
            if block.data.numel() < buffer.numel() and not self.capabilities.variable_length:
                return number
            buffer[: block.data.numel()].copy_(block.data)
            self.loads.append(key)
        return len(keys)

    async def save(self, blocks):
        await self._begin("save")
        for number, block in enumerate(blocks):
            if block.key not in self.blocks:
                if len(self.blocks) >= self.room:
                    return number
                self.put(block)
        return len(blocks)

    async def delete(self, keys):
        await self._begin("delete")
        for key in keys:
            self.blocks.pop(key, None)

    async def children(self, key):
        await self._begin("children")
        return [
            Child(block.key, block.tokens)
            for block in self.blocks.values()
            if block.parent == key and block.tokens is not None
        ]

    async def scan(self):
        for block in list(self.blocks.values()):
            yield _entry(block)

    async def describe(self, keys):
        await self._begin("describe")
        return [None if key not in self.blocks else _entry(self.blocks[key]) for key in keys]

    async def stats(self):
        await self._begin("stats")
        nbytes = sum(block.data.numel() for block in self.blocks.values())
        return {"blocks": len(self.blocks), "bytes": nbytes}


def _entry(block):
    return StoredEntry(
        block.key,
        block.data.numel(),
        block.priority,
        1.0,
        2.0,
        block.parent,
        block.tokens,
        block.namespace,
        block.model,
        block.group,
        expires_at=block.expires_at,
    )


@asynccontextmanager
async def tiered(*tiers, layouts=(), **settings):
    """A tiered store, open; all tiers recover before it is closed."""
    chosen = {"verify_frames": False, "patience_s": 2.0, **settings}
    store = TieredBackend(tiers, TieredSettings(**chosen))
    await store.open(layouts)
    try:
        yield store
    finally:
        for tier in tiers:
            tier.recover()
        await store.close()


async def until(condition):
    """Returns once `condition` holds."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.001)
