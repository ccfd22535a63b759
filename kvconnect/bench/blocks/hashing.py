"""What block keys cost."""

from __future__ import annotations

import time

import numpy as np

from kvconnect.bench.blocks.own_cache import LAYOUT, OwnCache
from kvconnect.bench.blocks.traffic import BLOCK
from kvconnect.keys import KeyChain, Namespace, root_key
from kvconnect.tokens import TokenBuffer

__all__ = ["hash_seconds_per_block", "make_chain"]


def make_chain(tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> KeyChain:
    """The keys of a request of these tokens, not hashed yet."""
    return KeyChain(root_key(b"model", (LAYOUT,), Namespace()), BLOCK, TokenBuffer(tokens))


def hash_seconds_per_block(tokens: int, repeats: int) -> dict[str, list[float]]:
    """Seconds per block that the keys of a request take: the ``first`` time, and ``again``.

    ``by_key``: to find all its published blocks by key for the first time.
    """
    rng = np.random.default_rng(4)
    spent: dict[str, list[float]] = {"first": [], "again": [], "by_key": []}
    for number in range(repeats):
        prompt = rng.integers(0, 100_000, tokens, dtype=np.int32)
        manager = OwnCache(tokens // BLOCK).manager
        manager.add_sequence(number, prompt, keys=make_chain(prompt))
        for name in ("first", "again"):
            start = time.perf_counter()
            keys = manager.block_keys(number)
            spent[name].append((time.perf_counter() - start) * BLOCK / tokens)
        manager.commit(number, tokens)
        start = time.perf_counter()
        manager.pin_keys(keys)
        spent["by_key"].append((time.perf_counter() - start) * BLOCK / tokens)
    return spent
