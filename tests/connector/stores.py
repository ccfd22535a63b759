"""A store in a dictionary that outlives engines, with doors to hold calls and faults to plant."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from kvconnect.backend import Backend, Capabilities, Child, StoredBlock
from kvconnect.keys import BlockKey


class Door:
    """Calls wait behind it while it is shut. Opened at the latest when a test ends."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.waiting = threading.Semaphore(0)

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def pass_through(self) -> None:
        if not self._open.is_set():
            self.waiting.release()
            await asyncio.to_thread(self._open.wait, 120)

    def await_caller(self) -> None:
        """Block until a call waits behind the door."""
        assert self.waiting.acquire(timeout=60)


class DictStore(Backend):
    """Frames by key."""

    def __init__(self, *, enumerable: bool = True) -> None:
        self.capabilities = Capabilities(enumerable=enumerable)
        self.frames: dict[BlockKey, Tensor] = {}
        self.blocks: list[StoredBlock] = []
        self.lookups: list[list[BlockKey]] = []
        self.loads: list[list[BlockKey]] = []
        self.saves: list[list[BlockKey]] = []
        self.open_error: Exception | None = None
        self.load_error: Exception | None = None
        self.save_error: Exception | None = None
        self.lookup_error: Exception | None = None
        self.room = 10**9
        self.at_lookup, self.at_load, self.at_save = Door(), Door(), Door()
        self.tamper: Callable[[BlockKey, Tensor], None] = lambda _key, _buffer: None
        self.foster_children: list[Child] = []
        self.is_open = False

    async def open(self, layouts: object, access: str = "store") -> None:
        if self.open_error:
            raise self.open_error
        self.is_open = True

    async def close(self) -> None:
        self.is_open = False

    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        self.lookups.append(list(keys))
        await self.at_lookup.pass_through()
        if self.lookup_error:
            raise self.lookup_error
        return next((i for i, key in enumerate(keys) if key not in self.frames), len(keys))

    async def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        self.loads.append(list(keys))
        await self.at_load.pass_through()
        if self.load_error:
            raise self.load_error
        for number, (key, buffer) in enumerate(zip(keys, into, strict=True)):
            if key not in self.frames:
                return number
            buffer.copy_(self.frames[key])
            self.tamper(key, buffer)
        return len(keys)

    async def save(self, blocks: Sequence[StoredBlock]) -> int:
        self.saves.append([block.key for block in blocks])
        await self.at_save.pass_through()
        if self.save_error:
            raise self.save_error
        for number, block in enumerate(blocks):
            if len(self.frames) >= self.room and block.key not in self.frames:
                return number
            if block.key not in self.frames:
                self.blocks.append(block)
                self.frames[block.key] = block.data.clone()
        return len(blocks)

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self.frames.pop(key, None)

    async def children(self, key: BlockKey | None) -> Sequence[Child]:
        own = [
            Child(block.key, block.tokens)
            for block in self.blocks
            if block.parent == key and block.key in self.frames and block.tokens is not None
        ]
        return [*self.foster_children, *own]

    def open_doors(self) -> None:
        for door in (self.at_lookup, self.at_load, self.at_save):
            door.open()
