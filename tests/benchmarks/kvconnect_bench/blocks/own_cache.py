"""The block manager of kvconnect as the benchmark drives it, and the cost of its block keys."""

from __future__ import annotations

import itertools
import time
from typing import NamedTuple

import numpy as np
import torch

from kvconnect import KvCacheConfig, KvCacheLayout
from kvconnect.cache.block_manager import BlockManager
from kvconnect.keys import KeyChain, Namespace, root_key
from kvconnect.tokens import TokenBuffer
from kvconnect_bench.blocks.traffic import BLOCK, TokenIds

_LAYOUT = KvCacheLayout(1, 1, 1, 1, BLOCK, torch.float16)
"""The smallest layout: the block manager's work does not depend on what a block holds."""


class OwnRequest(NamedTuple):
    """A request id and its tokens."""

    request_id: int
    tokens: TokenIds


def make_manager(num_blocks: int) -> BlockManager:
    """Makes a manager of one full-attention pool with default settings."""
    config = KvCacheConfig(tokens_per_block=BLOCK)
    return BlockManager(config, _LAYOUT, num_blocks=num_blocks)


class OwnCache:
    """A block manager, driven as `KVCacheManager` drives it: first it matches, then it adds."""

    def __init__(self, num_blocks: int) -> None:
        self.manager = make_manager(num_blocks)
        self._numbers = itertools.count()

    def request(self, tokens: TokenIds) -> OwnRequest:
        """Implements `Cache.request`."""
        return OwnRequest(next(self._numbers), tokens)

    def match(self, request: OwnRequest) -> None:
        """Implements `Cache.match`."""
        self.manager.match(request.tokens)

    def claim(self, request: OwnRequest) -> None:
        """Implements `Cache.claim`; matches the tokens once more."""
        self.manager.add_sequence(request.request_id, request.tokens)

    def publish(self, request: OwnRequest) -> None:
        """Implements `Cache.publish`."""
        self.manager.commit(request.request_id, len(request.tokens))

    def release(self, request: OwnRequest) -> None:
        """Implements `Cache.release`."""
        self.manager.release(request.request_id)


def make_chain(tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> KeyChain:
    """Makes the keys of a request of these tokens, not hashed yet."""
    return KeyChain(root_key(b"model", (_LAYOUT,), Namespace()), BLOCK, TokenBuffer(tokens))


def hash_seconds_per_block(tokens: int, repeats: int) -> dict[str, list[float]]:
    """Returns the seconds per block that the keys of a request take, in each of `repeats` requests.

    ``first`` is the first call, and ``again`` the second. ``by_key`` is the time to find all
    published blocks of the request by key for the first time.
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
