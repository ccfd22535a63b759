"""A store of which a test says, block by block, when it comes and what comes."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import takewhile

from torch import Tensor

from kvconnect import frame
from kvconnect.backend import Backend, Capabilities, Child, StoredBlock
from kvconnect.keys import BlockKey


class LateStore(Backend):
    """Frames by key.

    Attributes:
        blocks: the pool group and the tokens of each key that was ever saved.
        held: a load of one of these waits until `release`.
        lost: these are gone when they are loaded, though a lookup found them.
        broken: these come with a flipped bit.
        failing: a load of one of these raises.
        writable: whether what is saved is kept.
        waits: set once a load waits.
    """

    capabilities = Capabilities(enumerable=True)

    def __init__(self) -> None:
        self.frames: dict[BlockKey, Tensor] = {}
        self.blocks: dict[BlockKey, tuple[int, list[int]]] = {}
        self.after: defaultdict[BlockKey | None, list[Child]] = defaultdict(list)
        self.held: set[BlockKey] = set()
        self.lost: set[BlockKey] = set()
        self.broken: set[BlockKey] = set()
        self.failing: set[BlockKey] = set()
        self.writable = True
        self.waits = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: list[asyncio.Event] = []

    def become(self, other: LateStore) -> None:
        """Has what `other` has, in time and sound."""
        self.release()
        self.frames, self.blocks = dict(other.frames), dict(other.blocks)
        self.after = defaultdict(list, {key: list(one) for key, one in other.after.items()})
        self.lost, self.broken, self.failing = set(), set(), set()

    def release(self, keys: Iterable[BlockKey] | None = None) -> None:
        """Answers the loads that wait for these blocks, or for any; on any thread."""
        self.held = self.held.difference(self.held if keys is None else keys)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            one.set()

    def keys_at(self, prompt: list[int], *, states: bool = True) -> list[set[BlockKey]]:
        """Returns the keys of each block of `prompt` in all pool groups, its tail's too.

        Without `states` those of the last group, which has the states of recurrent layers, are
        left out.
        """
        known = list(self.blocks.items())
        last = max((group for _, (group, _) in known), default=0)
        size = max((len(own) for _, (_, own) in known), default=1)
        parts = (prompt[at : at + size] for at in range(0, len(prompt), size))
        keys = (
            {key for key, (group, own) in known if own == part and (states or group < last)}
            for part in parts
        )
        return list(takewhile(bool, keys))

    async def open(self, layouts: object, access: str = "store") -> None:
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        self._loop = None

    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.frames), len(keys))

    async def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        while self.held.intersection(keys):
            self._waiting.append(asyncio.Event())
            self.waits.set()
            await self._waiting[-1].wait()
        if self.failing.intersection(keys):
            raise OSError(5, "planted")
        for number, (key, buffer) in enumerate(zip(keys, into, strict=True)):
            if key in self.lost:
                self.frames.pop(key, None)
            found = self.frames.get(key)
            if found is None or found.numel() != buffer.numel():
                return number
            buffer.copy_(found)
            if key in self.broken:
                buffer[frame.HEADER_NBYTES + 11] ^= 4
        return len(keys)

    async def save(self, blocks: Sequence[StoredBlock]) -> int:
        for block in blocks:
            if not self.writable or block.key in self.frames:
                continue
            self.frames[block.key] = block.data.clone()
            self.lost.discard(block.key)
            self.broken.discard(block.key)
            tokens = [] if block.tokens is None else block.tokens.tolist()
            self.blocks[block.key] = (block.group, tokens)
            if block.tokens is not None:
                children = self.after[block.parent]
                children[:] = [one for one in children if one.key != block.key]
                children.append(Child(block.key, block.tokens))
        return len(blocks)

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self.frames.pop(key, None)

    async def children(self, key: BlockKey | None) -> Sequence[Child]:
        return [child for child in self.after.get(key, ()) if child.key in self.frames]
