"""A store that tests of recurrent states read and damage, and prompts that branch off others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import torch

from kvconnect.backend import Backend, StoredBlock
from kvconnect.keys import BlockKey

__all__ = ["FrameStore", "branches"]


class FrameStore(Backend):
    """A store of frames in a dict.

    Attributes:
        frames, groups: the frame and the pool group of each key.
        writable: whether `save` and `delete` have an effect.
        at_load: called before each load.
    """

    def __init__(self) -> None:
        self.frames: dict[BlockKey, torch.Tensor] = {}
        self.groups: dict[BlockKey, int] = {}
        self.writable = True
        self.at_load: Callable[[], Awaitable[None]] | None = None

    @property
    def num_states(self) -> int:
        """Returns how many frames hold states."""
        return sum(self.groups[key] > 0 for key in self.frames)

    def drop_states(self) -> None:
        """Drops all frames of states."""
        self.frames = {key: one for key, one in self.frames.items() if not self.groups[key]}

    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        return next((n for n, key in enumerate(keys) if key not in self.frames), len(keys))

    async def load(self, keys: Sequence[BlockKey], into: Sequence[torch.Tensor]) -> int:
        if self.at_load is not None:
            await self.at_load()
        for number, (key, room) in enumerate(zip(keys, into, strict=True)):
            found = self.frames.get(key)
            if found is None or found.numel() != room.numel():
                return number
            room.copy_(found)
        return len(keys)

    async def save(self, blocks: Sequence[StoredBlock]) -> int:
        for block in blocks if self.writable else ():
            self.frames[block.key] = block.data.clone()
            self.groups[block.key] = block.group
        return len(blocks)

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        for key in keys if self.writable else ():
            self.frames.pop(key, None)


def branches(rng: np.random.Generator, known: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns four prompts of at most 60 tokens that begin like some of `known`."""
    prompts = []
    for _ in range(4):
        stem = known[rng.integers(len(known))]
        stem = stem[: rng.integers(len(stem) + 1)]
        more = rng.integers(0, 3, rng.integers(1, 20)).tolist()
        prompts.append([*stem, *more][-60:])
    return prompts
