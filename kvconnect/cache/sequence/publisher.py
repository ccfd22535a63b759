"""Decides when the blocks of sequences are published."""

from __future__ import annotations

from kvconnect.cache.sequence.publication import Publication
from kvconnect.cache.sequence.sequence import Sequence
from kvconnect.cache.tree.radix_tree import RadixTree
from kvconnect.config import KvCacheConfig

__all__ = ["Publisher"]


class Publisher:
    """Publishes the blocks that sequences filled, while they run and at their end.

    With full attention, a running sequence publishes no block after the first one that another
    sequence published before. Otherwise the sequence would reference blocks below a block that it
    does not reference. When the sequence ends, every valid block is tried once more, since its
    references end, too. Window pools have no such rule.

    Args:
        tails: whether a partly filled block can be matched; not in a cache with recurrent states.
    """

    def __init__(self, tree: RadixTree, config: KvCacheConfig, *, tails: bool) -> None:
        self._tree = tree
        self._reuse = config.enable_block_reuse
        self._tails = config.enable_partial_reuse and tails

    def commit(self, sequence: Sequence, stop: int) -> None:
        """Publishes the full blocks of `sequence` before number `stop`, which stay held."""
        first = sequence.attempted
        if stop > first and self._reuse:
            sequence.attempted = stop
            Publication(self._tree, sequence).blocks(first, stop)

    def publish_ended(self, sequence: Sequence, num_valid: int) -> None:
        """Publishes the valid blocks of an ended sequence that keeps them, tail included.

        Duplicates, and with full attention all blocks after them, are published by `finish` only.
        """
        blocks, tail = divmod(num_valid, self._tree.tokens_per_block)
        self.commit(sequence, blocks)
        if self._publishes_tail(sequence, blocks, tail):
            Publication(self._tree, sequence).tail(blocks, tail)

    def finish(self, sequence: Sequence, num_valid: int) -> None:
        """Publishes the valid blocks at the end of `sequence`; the caller then releases them."""
        if not self._reuse:
            return
        size = self._tree.tokens_per_block
        blocks, tail = divmod(num_valid, size)
        self.commit(sequence, blocks)
        if sequence.is_published:
            return
        publication = Publication(self._tree, sequence, ends=True)
        if sequence.pins:
            publication.close_pinned(-(-num_valid // size))
        start = publication.first_private(blocks)
        if start < blocks:
            publication.blocks(start, blocks)
        if self._publishes_tail(sequence, blocks, tail):
            publication.tail(blocks, tail)

    def _publishes_tail(self, sequence: Sequence, blocks: int, tail: int) -> bool:
        committed = sequence.computed // self._tree.tokens_per_block
        return bool(tail) and self._reuse and self._tails and blocks >= committed
