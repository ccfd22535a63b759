"""Puts the blocks of sequences into the tree."""

from __future__ import annotations

from kvconnect.cache.block_pool import BlockPool
from kvconnect.cache.radix_tree import RadixTree
from kvconnect.cache.segment import BlockIds, Segment
from kvconnect.cache.sequence import Sequence

__all__ = ["Publisher"]


class Publisher:
    """Publishes what sequences filled (specification: block manager, publishing).

    A running sequence stops at the first block that another one published before: what followed
    would be a referenced block under one that this sequence does not reference. At its end nothing
    of it is referenced any more, and every valid block is offered once more.
    """

    def __init__(
        self, tree: RadixTree, pool: BlockPool, tokens_per_block: int, *, tails: bool
    ) -> None:
        self._tree = tree
        self._pool = pool
        self._tokens_per_block = tokens_per_block
        self._stride = 4 * tokens_per_block
        self._tails = tails

    def commit(self, sequence: Sequence, stop: int) -> None:
        """Publish its full blocks up to number `stop`, or up to the first duplicate."""
        if sequence.duplicate is not None or stop <= sequence.published:
            return
        parent = self._parent(sequence)
        first = sequence.published
        if parent.children.get(bytes(self._key(sequence, first, first + 1))) is not None:
            sequence.duplicate = first
            return
        self._publish_held(sequence, parent, stop)

    def finish(self, sequence: Sequence, num_valid: int, moment: int) -> BlockIds:
        """Publish what is valid at the end of `sequence`, and return its blocks that stay private.

        The caller then lets go of ``sequence.segment`` at the same `moment`.
        """
        # A block that was committed whole is offered whole, whatever is said to be valid now.
        full = max(num_valid, sequence.computed // self._tokens_per_block * self._tokens_per_block)
        blocks = full // self._tokens_per_block
        tail = full % self._tokens_per_block if self._tails else 0
        self.commit(sequence, blocks)
        if sequence.published >= blocks:
            return self._finish_held(sequence, tail)
        if any(pin.end > sequence.published for pin in sequence.pins):
            return sequence.ids[sequence.published :]
        return self._offer(sequence, blocks, tail, moment)

    def _finish_held(self, sequence: Sequence, tail: int) -> BlockIds:
        at = sequence.published
        if tail:
            parent = self._parent(sequence)
            if not self._tree.published_tail(parent, at, self._key(sequence, at, at + 1, tail)):
                self._publish_held(sequence, parent, at + 1, tail)
        return sequence.ids[sequence.published :]

    def _offer(self, sequence: Sequence, blocks: int, tail: int, moment: int) -> BlockIds:
        first = sequence.published
        segment, at = self._tree.walk(self._parent(sequence), sequence.tokens, blocks)
        private = sequence.ids[first:at]
        if at < blocks:
            if at < segment.end:
                segment = self._tree.split(segment, at)
            segment = self._publish_free(sequence, segment, at, blocks, moment)
        rest = blocks
        if tail and not self._tree.published_tail(
            segment, blocks, self._key(sequence, blocks, blocks + 1, tail)
        ):
            if blocks < segment.end:
                segment = self._tree.split(segment, blocks)
            self._publish_free(sequence, segment, blocks, blocks + 1, moment, tail)
            rest += 1
        private.extend(sequence.ids[rest:])
        return private

    def _publish_held(self, sequence: Sequence, parent: Segment, stop: int, tail: int = 0) -> None:
        # Runs end where retention changes, and where a pin ends: below it there are fewer
        # references.
        first = sequence.published
        for run in sequence.plan.runs(first, stop):
            at = run.start
            while at < run.stop:
                pins = [pin for pin in sequence.pins if pin.end > at]
                end = min([run.stop, *(pin.end for pin in pins)])
                parent = self._pool.publish(
                    parent,
                    self._key(sequence, at, end, tail),
                    sequence.ids[at:end],
                    run.retention,
                    1 + len(pins),
                    tail=tail > 0,
                )
                for pin in pins:
                    pin.segment = parent
                at = end
        self._pool.unhold(sequence.ids[first:stop])
        sequence.segment, sequence.published = parent, stop

    def _publish_free(
        self, sequence: Sequence, parent: Segment, first: int, stop: int, moment: int, tail: int = 0
    ) -> Segment:
        for run in sequence.plan.runs(first, stop):
            key = self._key(sequence, run.start, run.stop, tail)
            ids = sequence.ids[run.start : run.stop]
            parent = self._pool.publish(parent, key, ids, run.retention, 0, moment, tail=tail > 0)
        return parent

    def _parent(self, sequence: Sequence) -> Segment:
        if sequence.segment is not None:
            return sequence.segment
        chain = sequence.chain
        return self._tree.root(sequence.namespace, chain.root if chain is not None else None)

    def _key(self, sequence: Sequence, start: int, stop: int, tail: int = 0) -> bytearray:
        # The tokens of these blocks; of the first `tail` of the only one, if that is not full.
        low = start * self._stride
        return sequence.tokens[low : low + 4 * tail if tail else stop * self._stride]
