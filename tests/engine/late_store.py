"""A store of which a test says, block by block, when it comes and what comes."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence

from torch import Tensor

from kvconnect import frame
from kvconnect.backend import Backend, Capabilities, Child, StoredBlock
from kvconnect.keys import BlockKey


class LateStore(Backend):
    """Frames by key.

    Attributes:
        held: a load of one of these waits until `release`.
        lost: these are gone when they are loaded, though a lookup found them.
        broken: these come with a flipped bit.
        failing: a load of one of these raises.
        frozen: what is saved is not kept.
        waits: set once a load waits.
    """

    capabilities = Capabilities(enumerable=True)

    def __init__(self) -> None:
        self.frames: dict[BlockKey, Tensor] = {}
        self.after: defaultdict[BlockKey | None, list[Child]] = defaultdict(list)
        self.held: set[BlockKey] = set()
        self.lost: set[BlockKey] = set()
        self.broken: set[BlockKey] = set()
        self.failing: set[BlockKey] = set()
        self.frozen = False
        self.waits = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: list[asyncio.Event] = []

    def become(self, other: LateStore) -> None:
        """Has what `other` has, in time and sound."""
        self.release()
        self.frames = dict(other.frames)
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

    def keys_of(self, prompt: Sequence[int]) -> list[BlockKey]:
        """The keys of the blocks of `prompt`, in order, that of its tail too."""
        keys: list[BlockKey] = []
        at = 0
        keys_known = {one.key for known in list(self.after.values()) for one in list(known)}
        roots = self.after.keys() - keys_known
        if not roots:
            return []
        [parent] = roots
        while at < len(prompt):
            children = self.after.get(parent, ())
            fitting = [one for one in children if _begins(prompt[at:], one.tokens.tolist())]
            if not fitting:
                break
            longest = max(fitting, key=lambda one: len(one.tokens))
            parent = longest.key
            keys.append(parent)
            at += len(longest.tokens)
        return keys

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
            if key not in self.frames:
                return number
            buffer.copy_(self.frames[key])
            if key in self.broken:
                buffer[frame.HEADER_NBYTES + 11] ^= 4
        return len(keys)

    async def save(self, blocks: Sequence[StoredBlock]) -> int:
        for block in blocks:
            if self.frozen or block.key in self.frames:
                continue
            self.frames[block.key] = block.data.clone()
            self.lost.discard(block.key)
            self.broken.discard(block.key)
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


def _begins(tokens: Sequence[int], start: Sequence[int]) -> bool:
    return len(start) > 0 and list(tokens[: len(start)]) == list(start)
