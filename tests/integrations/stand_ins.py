"""What stands in for a client's engine: it says so, keeps blocks in a dict, and checks its callers.

The adapters under test are the projects' own files. What they call is native code that needs a GPU,
a server or a fabric; in its place is the least that moves real blocks between the pool and memory.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

import torch

Key = tuple[int, ...]


def module(name: str, path: str | None = None, **contents: object) -> ModuleType:
    """Import of `name` gives these `contents` from now on; with `path` it is a package."""
    made = sys.modules[name] = ModuleType(name, "a stand-in, made by a test")
    vars(made).update(contents)
    made.__path__ = [path] if path else []
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, made)
    return made


class StandInStore:
    """Blocks in memory, by the tokens up to their end."""

    def __init__(self, tokens_per_block: int) -> None:
        self.tokens_per_block = tokens_per_block
        self.blocks: dict[Key, torch.Tensor] = {}
        self.pool: torch.Tensor | None = None
        self.loaded = 0

    def prefixes(self, tokens: Sequence[int]) -> list[Key]:
        size = self.tokens_per_block
        return [tuple(tokens[:end]) for end in range(size, len(tokens) + 1, size)]

    def lookup(self, tokens: Sequence[int]) -> int:
        """How many leading tokens are here."""
        found = 0
        for key in self.prefixes(tokens):
            if key not in self.blocks:
                break
            found = len(key)
        return found

    def store(self, tokens: Sequence[int], block_ids: Sequence[int]) -> None:
        for key, block in zip(self.prefixes(tokens), block_ids, strict=False):
            self.blocks.setdefault(key, self.pool[block].clone())

    def load(self, tokens: Sequence[int], block_ids: Sequence[int]) -> None:
        for key, block in zip(self.prefixes(tokens), block_ids, strict=False):
            if key in self.blocks:
                self.pool[block].copy_(self.blocks[key])
                self.loaded += 1

    def spoil(self) -> None:
        """What is here is wrong from now on."""
        for block in self.blocks.values():
            block.normal_()
