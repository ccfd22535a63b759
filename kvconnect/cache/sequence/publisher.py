"""When the blocks of sequences are published (specification: publishing)."""

from __future__ import annotations

from kvconnect.cache.sequence.publication import Publication
from kvconnect.cache.sequence.sequence import Sequence
from kvconnect.cache.tree.radix_tree import RadixTree
from kvconnect.config import KvCacheConfig

__all__ = ["Publisher"]


class Publisher:
    """Publishes what sequences filled, while they run and at their end.

    With full attention a running sequence stops at the first block that another one published
    before: what followed would be a referenced block under one that this sequence does not
    reference. At its end nothing of it is referenced any more, and the publisher tries every
    valid block once more. Window pools know no such order.
    """

    def __init__(self, tree: RadixTree, config: KvCacheConfig) -> None:
        self._tree = tree
        self._reuse = config.enable_block_reuse
        self._tails = config.enable_partial_reuse

    def commit(self, sequence: Sequence, stop: int) -> None:
        """Publish its full blocks up to number `stop`; it goes on to hold them."""
        first = sequence.attempted
        if stop > first and self._reuse:
            sequence.attempted = stop
            Publication(self._tree, sequence).blocks(first, stop)

    def finish(self, sequence: Sequence, num_valid: int) -> None:
        """Publish what is valid at the end of `sequence`; the caller then lets go of its blocks."""
        if not self._reuse:
            return
        size = self._tree.tokens_per_block
        # A block that was committed whole is published whole, whatever is said to be valid now.
        valid = max(num_valid, sequence.computed // size * size)
        blocks, tail = divmod(valid, size)
        self.commit(sequence, blocks)
        if sequence.is_published:
            return
        publication = Publication(self._tree, sequence, ends=True)
        if sequence.pins:
            publication.close_pinned(-(-valid // size))
        start = publication.first_private(blocks)
        if start < blocks:
            publication.blocks(start, blocks)
        if tail and self._tails:
            publication.tail(blocks, tail)
