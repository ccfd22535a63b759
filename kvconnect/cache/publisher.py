"""When the blocks of sequences are published (specification: publishing)."""

from __future__ import annotations

from collections.abc import Sequence as Items

from kvconnect.cache.block_pool import BlockPool
from kvconnect.cache.offer import Offer
from kvconnect.cache.radix_tree import RadixTree
from kvconnect.cache.segment import BlockIds
from kvconnect.cache.sequence import Sequence
from kvconnect.config import KvCacheConfig

__all__ = ["Publisher"]


class Publisher:
    """Publishes what sequences filled, while they run and at their end.

    With full attention a running sequence stops at the first block that another one published
    before: what followed would be a referenced block under one that this sequence does not
    reference. At its end nothing of it is referenced any more, and every valid block is offered
    once more. Window pools know no such order.
    """

    def __init__(self, tree: RadixTree, pools: Items[BlockPool], config: KvCacheConfig) -> None:
        self._tree = tree
        self._pools = pools
        self._reuse = config.enable_block_reuse
        self._tails = config.enable_partial_reuse

    def commit(self, sequence: Sequence, stop: int) -> None:
        """Publish its full blocks up to number `stop`; it goes on to hold them."""
        first = sequence.offered
        if stop > first and self._reuse:
            sequence.offered = stop
            Offer(self._tree, self._pools, sequence).blocks(first, stop)

    def finish(
        self, sequence: Sequence, num_valid: int, moments: Items[int]
    ) -> tuple[BlockIds, ...]:
        """Publish what is valid at the end of `sequence`; what stays private, by pool.

        Its pins keep what they hold of that, loose. The caller then lets go of what the sequence
        references, at the same `moments`.
        """
        size = self._tree.tokens_per_block
        # A block that was committed whole is offered whole, whatever is said to be valid now.
        valid = max(num_valid, sequence.computed // size * size) if self._reuse else 0
        blocks, tail = divmod(valid, size)
        self.commit(sequence, blocks)
        offer = Offer(self._tree, self._pools, sequence, moments)
        offer.close_pinned(-(-valid // size))
        start = offer.first_private(blocks)
        if start < blocks:
            offer.blocks(start, blocks)
        if tail and self._tails:
            offer.tail(blocks, tail)
        for pin in sequence.pins:
            for group, held in enumerate(pin.grips):
                held.loose.extend(offer.left(group, held.first, held.end))
        return tuple(offer.left(group, 0, sequence.num_blocks) for group in range(len(self._pools)))
