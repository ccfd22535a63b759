"""kvconnect's own block manager as the benchmark drives it."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from kvconnect import KvCacheConfig, KvCacheLayout
from kvconnect.bench.blocks.traffic import BLOCK, TokenIds
from kvconnect.cache.block_manager import BlockManager

__all__ = ["LAYOUT", "OwnCache", "make_manager"]

LAYOUT = KvCacheLayout(1, 1, 1, 1, BLOCK, torch.float16)
"""The smallest: what a block holds does not matter to who counts blocks."""


class OwnRequest(NamedTuple):
    """A request id and its tokens."""

    request_id: int
    tokens: TokenIds


def make_manager(num_blocks: int) -> BlockManager:
    """A manager of one full-attention pool with the settings of a user who sets nothing."""
    config = KvCacheConfig(tokens_per_block=BLOCK)
    return BlockManager(config, LAYOUT, num_blocks=num_blocks)


class OwnCache:
    """The manager as `KVCacheManager` drives it: it asks what matches, and then adds."""

    def __init__(self, num_blocks: int) -> None:
        self.manager = make_manager(num_blocks)
        self._numbers = itertools.count()

    def request(self, tokens: TokenIds) -> OwnRequest:
        """See `Cache`."""
        return OwnRequest(next(self._numbers), tokens)

    def match(self, request: OwnRequest) -> None:
        """See `Cache`."""
        self.manager.match(request.tokens)

    def claim(self, request: OwnRequest) -> None:
        """See `Cache`. It matches once more."""
        self.manager.add_sequence(request.request_id, request.tokens)

    def publish(self, request: OwnRequest) -> None:
        """See `Cache`."""
        self.manager.commit(request.request_id, len(request.tokens))

    def release(self, request: OwnRequest) -> None:
        """See `Cache`."""
        self.manager.release(request.request_id)
