"""A store of full blocks beyond the engine that evicts the least recently used chain end first."""

from __future__ import annotations

import numpy as np
import torch

from kvconnect.cache.block_manager import BlockManager
from kvconnect.config import KvCacheConfig
from kvconnect.layout import KvCacheLayout
from kvconnect.tokens import TokenArray

_ID = 0


class ExternalTier:
    """The full blocks that a store of `num_blocks` holds.

    A store keeps blocks by chained key and evicts the least recently used one that no other
    follows. Using a block counts as using those before it. A block manager treats unreferenced
    blocks the same way, so this is one, whose sequences last for one save. Its cost grows with
    segments; a dictionary of keys would cost a hash per block.

    Args:
        num_blocks: at least 1.
        tokens_per_block: the tokens per block of the engine's cache.

    Attributes:
        num_saved: blocks written so far.
        num_dropped: blocks evicted so far.
    """

    def __init__(self, num_blocks: int, tokens_per_block: int) -> None:
        self.num_blocks = num_blocks
        self.num_saved = 0
        self.num_dropped = 0
        self._tokens_per_block = tokens_per_block
        config = KvCacheConfig(tokens_per_block=tokens_per_block, enable_partial_reuse=False)
        layout = KvCacheLayout(1, 1, 1, 1, tokens_per_block, torch.int8)
        # One more than it holds: a manager leaves the last token of a prompt unmatched, so `save`
        # adds one, in a block that is blank again before anything else happens.
        self._blocks = BlockManager(config, layout, num_blocks=num_blocks + 1)

    def match(self, tokens: TokenArray, num_tokens: int) -> int:
        """Returns how many of the first `num_tokens` tokens it has in full blocks.

        Changes nothing.
        """
        return self._blocks.match(_and_one(tokens, num_tokens))

    def save(self, tokens: TokenArray, num_tokens: int) -> None:
        """Publishes the full blocks of the first `num_tokens` tokens, and counts as using them."""
        # A chain that is longer than the store keeps only its beginning.
        stop = min(num_tokens // self._tokens_per_block, self.num_blocks) * self._tokens_per_block
        if stop == 0:
            return
        allocation = self._blocks.add_sequence(_ID, _and_one(tokens, stop))
        self._blocks.abort(_ID, stop)
        self.num_saved += (stop - allocation.matched_tokens) // self._tokens_per_block
        self.num_dropped = self._blocks.num_reclaimed_blocks()


def _and_one(tokens: TokenArray, num_tokens: int) -> TokenArray:
    """Returns the first `num_tokens` tokens and one more of any value."""
    if num_tokens < len(tokens):
        return tokens[: num_tokens + 1]
    return np.append(tokens[:num_tokens], np.int32(0))
