"""A single attempt to publish blocks of a sequence."""

from __future__ import annotations

from bisect import bisect_right

from kvconnect.cache.pool.held_blocks import NOT_HELD, HeldBlocks, HeldPath
from kvconnect.cache.sequence.sequence import Sequence
from kvconnect.cache.tree.radix_tree import RadixTree
from kvconnect.cache.tree.retention import RetentionRun
from kvconnect.cache.tree.segment import Segment


class Publication:
    """An attempt to publish the private blocks of a sequence along its path, pool by pool.

    If a pool has a block of the path in primary already, the sequence's block stays private: it is
    a duplicate. If the pool has the block in secondary only, or not at all, the sequence's block is
    published. The sequence, and its pins, reference the published blocks.

    With full attention, a running sequence publishes no block after the first one that another
    sequence published before. Otherwise the sequence would reference blocks below a block that it
    does not reference. When the sequence ends, every valid block is tried once more, since its
    references end, too. Window pools have no such rule.

    Args:
        tree: the tree to publish in.
        sequence: the sequence whose blocks are published.
        ends: whether the sequence releases all its blocks right after this.
    """

    __slots__ = ("_closed", "_done", "_ends", "_held", "_sequence", "_stop", "_tree")

    def __init__(self, tree: RadixTree, sequence: Sequence, *, ends: bool = False) -> None:
        self._tree = tree
        self._sequence = sequence
        self._held = sequence.held
        self._ends = ends
        self._closed: list[HeldBlocks] = []
        self._stop = 0
        self._done = False

    # ---------------------------------------------------------------- the blocks

    def blocks(self, first: int, stop: int) -> None:
        """Publishes the full blocks ``first..stop``."""
        sequence = self._sequence
        if self._all_stopped():
            return
        segment = self._tree.descend(self._start_below(first), sequence.tokens, first)
        cuts = self._cuts(first, stop)
        self._stop = stop
        for run in sequence.plan.runs(first, stop):
            at = run.start
            while at < run.stop and not self._done:
                end = run.stop
                if cuts:
                    next_cut = bisect_right(cuts, at)
                    end = min(end, cuts[next_cut]) if next_cut < len(cuts) else end
                segment = self._piece(segment, at, end, run)
                at = segment.end
        self._tree.prune(segment)

    def tail(self, block: int, num_tokens: int) -> None:
        """Publishes the first `num_tokens` of block number `block` as a tail.

        Does nothing if a published block begins with these tokens.
        """
        missing = [held for held in self._held if self._may_publish(held, block, block + 1)]
        if not missing:
            return
        tokens = self._sequence.tokens
        segment, at = self._tree.walk(self._start_below(block), tokens, block)
        low = block * self._tree.stride
        key = tokens[low : low + 4 * num_tokens]
        if at == block:
            for other in self._tree.followers(segment, block, key):
                if all(other.pools[held.pool.group].is_resident for held in missing):
                    return
        segment = self._tree.arrive(segment, at, tokens, block)
        run = next(self._sequence.plan.runs(block, block + 1))
        child = segment.children.get(bytes(key))
        if child is None:
            child = self._tree.insert(segment, key, 1)
        self._settle(child, block, block + 1, run)
        self._tree.prune(child)

    # ---------------------------------------------------------------- at the end of a sequence

    def close_pinned(self, stop: int) -> None:
        """Excludes pools in which a pin holds private blocks after a duplicate.

        Only pools of full attention are affected. `stop` is the number of blocks that are valid,
        wholly or partly.
        """
        for held in self._held:
            if held.duplicate and held.pool.window is None:
                first = held.spans[0][1] if held.spans else 0
                pins = [pin.held[held.pool.group] for pin in self._sequence.pins]
                if any(pin.first < stop and pin.end > first for pin in pins):
                    self._closed.append(held)

    def first_private(self, stop: int) -> int:
        """Returns the first block before `stop` that may still be published, or `stop`."""
        first = stop
        for held in self._held:
            if held not in self._closed:
                first = min(first, held.first_private(stop))
        return first

    # ---------------------------------------------------------------- inside: where

    def _start_below(self, position: int) -> Segment:
        # Returns the deepest known segment above that block.
        best: Segment | None = None
        for held in self._held:
            segment = held.segment
            if segment is None or segment.end > position:
                continue
            if best is None or best.end < segment.end:
                best = segment
        if best is not None:
            return best
        chain = self._sequence.chain
        return self._tree.root(self._sequence.namespace, None if chain is None else chain.root)

    def _cuts(self, first: int, stop: int) -> list[int]:
        # Block numbers where the set of holders changes.
        sequence = self._sequence
        if len(self._held) == 1 and not sequence.pins and self._held[0].pool.window is None:
            return []
        blocks: set[int] = set()
        for held in self._held:
            blocks.update((held.first, held.stop))
            if held.pool.is_state:  # beside a load, the states between these are not held
                blocks.update((held.first + 1, held.stop - 1))
            if self._ends:
                blocks.update(block for span in held.spans for block in span)
        for pin in sequence.pins:
            for pinned in pin.held:
                blocks.update((pinned.first, pinned.end))
        return sorted(block for block in blocks if first < block < stop)

    # ---------------------------------------------------------------- inside: holders

    def _all_stopped(self) -> bool:
        for held in self._held:
            if held in self._closed:
                continue
            if self._ends or not held.duplicate or held.pool.window is not None:
                return False
        return True

    def _may_publish(self, held: HeldBlocks, start: int, stop: int) -> bool:
        if held.first > start or stop > held.stop or held in self._closed:
            return False
        if held.ids[start] == NOT_HELD:
            return False
        if self._ends:
            return not held.covers(start)
        return not held.duplicate or held.pool.window is not None

    def _holders(self, held: HeldBlocks, start: int, stop: int) -> list[HeldPath]:
        holders: list[HeldPath] = [held]
        for pin in self._sequence.pins:
            pinned = pin.held[held.pool.group]
            if pinned.holds(start, stop):
                holders.append(pinned)
        return holders

    # ---------------------------------------------------------------- inside: publishing

    def _piece(self, above: Segment, start: int, stop: int, run: RetentionRun) -> Segment:
        # Publishes blocks of the path below `above`, from its end up to `stop` or a part of that.
        found = self._tree.step(above, self._sequence.tokens, stop) if above.children else None
        if found is None:
            return self._new(above, start, stop, run)
        segment, at = found
        if at < segment.end:
            if self._only_duplicates(segment, start, at):
                # No block of this segment is published: it would be divided only to continue below.
                self._settle(segment, start, at, run)
                if at == self._stop or self._all_stopped():
                    self._done = True
                    return above
            segment = self._tree.split(segment, at)
        self._settle(segment, start, at, run)
        return segment

    def _new(self, above: Segment, start: int, stop: int, run: RetentionRun) -> Segment:
        sequence, stride = self._sequence, self._tree.stride
        tokens = sequence.tokens[start * stride : stop * stride]
        if self._may_extend(above, start, stop, run):
            self._tree.lengthen(above, tokens, stop - start, sequence.chain)
            for held in self._held:
                if held.segment is above:
                    held.pool.published.extend(above, held.ids[start:stop])
                    held.add(above, start, stop)
            return above
        segment = self._tree.insert(above, tokens, stop - start, sequence.chain)
        self._settle(segment, start, stop, run)
        return segment

    def _may_extend(self, above: Segment, start: int, stop: int, run: RetentionRun) -> bool:
        # Returns whether the new blocks would have the state of those of `above` in every pool.
        # This sequence holds `above`, so if there is one holder, it is this sequence.
        if above.children or run.inherited or self._sequence.pins:
            return False
        for held in self._held:
            group = held.pool.group
            no_more = held.first <= start and held.ids[start] == NOT_HELD
            if held.pool.is_state and no_more and not above.pools[group].is_resident:
                continue  # no snapshot here, and none there
            if held.segment is not above or not self._may_publish(held, start, stop):
                return False
            if not held.pool.published.can_extend(above, run.retention):
                return False
        return True

    def _only_duplicates(self, segment: Segment, start: int, stop: int) -> bool:
        for held in self._held:
            state = segment.pools[held.pool.group]
            if state.ids is None and self._may_publish(held, start, stop):
                return False
        return True

    def _settle(self, segment: Segment, start: int, stop: int, run: RetentionRun) -> None:
        # Each pool without a primary copy of these blocks gets the sequence's blocks.
        for held in self._held:
            if not self._may_publish(held, start, stop):
                continue
            pool = held.pool.published
            state = segment.pools[pool.group]
            if state.ids is not None:
                held.duplicate = True
                continue
            ids = held.ids[start:stop]
            holders = self._holders(held, start, stop)
            retention = held.inherited if run.inherited else run.retention
            if state.host_ids is None:
                pool.publish(segment, ids, retention, len(holders))
            else:
                wanted = retention if run.requested or run.inherited else None
                pool.adopt(segment, ids, wanted, len(holders))
            for holder in holders:
                holder.add(segment, start, stop)
