"""A store in a dictionary whose answers tests can delay, refuse and falsify."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

from kvconnect.backend import Backend, Capabilities, Child, StoredEntry
from kvconnect.errors import BackendUnavailable


class DictTier(Backend):
    """`blocks` by key. `hang` names operations that do not end until it is emptied and `go` set.

    Attributes:
        down: every call fails.
        boast: `lookup` says yes to everything.
        room: blocks that it takes.
    """

    def __init__(self, room=1 << 30, **capabilities):
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
        self.open_error = None
        self.is_open = False

    def keys(self):
        return set(self.blocks)

    def put(self, *blocks):
        for block in blocks:
            self.blocks[block.key] = replace(block, data=block.data.clone())

    def recover(self):
        self.hang.clear()
        self.down = False
        self.go.set()

    async def _begin(self, name):
        self.calls[name] += 1
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


class Refusing(DictTier):
    """Fails as stores do that are there and say no."""

    async def _begin(self, name):
        if name != "close":
            raise BackendUnavailable("no")


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
    )
