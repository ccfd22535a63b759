"""One offer of a sequence's blocks to the tree."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Items

from kvconnect.cache.block_pool import BlockPool
from kvconnect.cache.radix_tree import RadixTree
from kvconnect.cache.retention import RetentionRun
from kvconnect.cache.segment import BlockIds, Segment, new_ids
from kvconnect.cache.sequence import PathGrip, Sequence

__all__ = ["Offer"]


class Offer:
    """Walks along the path of a sequence and publishes, pool by pool, what nobody published yet.

    A block that is in primary already stays private. One that is in secondary only, or that this
    pool does not have, becomes the sequence's own.

    Args:
        tree: in which.
        pools: all of them.
        sequence: whose blocks.
        moments: by pool, when the sequence lets go; ``None``: it goes on to hold what it publishes.
    """

    def __init__(
        self,
        tree: RadixTree,
        pools: Items[BlockPool],
        sequence: Sequence,
        moments: Items[int] | None = None,
    ) -> None:
        self._tree = tree
        self._pools = pools
        self._sequence = sequence
        self._moments = moments
        self._closed = [False] * len(pools)
        self._given: list[PathGrip] = [PathGrip() for _ in pools] if moments else []
        self._stop = 0
        self._done = False

    # ---------------------------------------------------------------- what is offered

    def blocks(self, first: int, stop: int) -> None:
        """Offer the full blocks ``first..stop``."""
        sequence = self._sequence
        segment = self._tree.descend(self._start_below(first), sequence.tokens, first)
        cuts = self._cuts(first, stop)
        self._stop, self._done = stop, self._all_stopped()
        for run in sequence.plan.runs(first, stop):
            at = run.start
            while at < run.stop and not self._done:
                end = run.stop
                if cuts:
                    place = bisect_right(cuts, at)
                    end = min(end, cuts[place]) if place < len(cuts) else end
                segment = self._piece(segment, at, end, run)
                at = segment.end
        self._tree.prune(segment)

    def tail(self, block: int, num_tokens: int) -> None:
        """Offer the first `num_tokens` of that block, unless something begins with them already."""
        groups = [pool.group for pool in self._pools if self._offers(pool.group, block, block + 1)]
        if not groups:
            return
        segment = self._start_below(block)
        segment, at = self._tree.walk(segment, self._sequence.tokens, block)
        low = block * self._tree.stride
        key = self._sequence.tokens[low : low + 4 * num_tokens]
        if at == block:
            for other in self._tree.followers(segment, block, key):
                if all(other.pools[group].is_resident for group in groups):
                    return
        segment = self._tree.arrive(segment, at, self._sequence.tokens, block)
        run = next(self._sequence.plan.runs(block, block + 1))
        child = segment.children.get(bytes(key))
        if child is None:
            child = self._tree.insert(segment, key, 1)
        self._settle(child, block, block + 1, run)
        self._tree.prune(child)

    # ---------------------------------------------------------------- at the end of a sequence

    def close_pinned(self, stop: int) -> None:
        """With full attention: a duplicate, and what follows it, stays if a pin holds private ones.

        `stop` is the number of blocks that are valid, in whole or in part.
        """
        sequence = self._sequence
        for pool, grip in zip(self._pools, sequence.grips, strict=True):
            if pool.window is None and grip.duplicate:
                first = grip.spans[0][1] if grip.spans else 0
                pins = [pin.grips[pool.group] for pin in sequence.pins]
                self._closed[pool.group] = any(pin.first < stop and pin.end > first for pin in pins)

    def first_private(self, stop: int) -> int:
        """The first block before `stop` that may still be published; `stop`: none."""
        first = stop
        for grip, closed in zip(self._sequence.grips, self._closed, strict=True):
            if not closed:
                span = next(grip.private(0, stop), None)
                first = first if span is None else min(first, span[0])
        return first

    def left(self, group: int, first: int, stop: int) -> BlockIds:
        """The ids among the places ``first..stop`` of one pool that are not published now."""
        grip, ids = self._sequence.grips[group], new_ids()
        for low, high in grip.private(first, stop):
            for start, end in self._given[group].gaps(low, high):
                ids.extend(grip.ids[start:end])
        return ids

    # ---------------------------------------------------------------- inside: where

    def _start_below(self, position: int) -> Segment:
        # Somewhere above that place, as far down as is known.
        best: Segment | None = None
        for grip in self._sequence.grips:
            segment = grip.segment
            if segment is None or segment.end > position:
                continue
            if best is None or best.end < segment.end:
                best = segment
        if best is not None:
            return best
        chain = self._sequence.chain
        return self._tree.root(self._sequence.namespace, None if chain is None else chain.root)

    def _cuts(self, first: int, stop: int) -> list[int]:
        # Where who holds the blocks changes.
        sequence = self._sequence
        if len(self._pools) == 1 and not sequence.pins and self._pools[0].window is None:
            return []
        places: set[int] = set()
        for grip in sequence.grips:
            places.update((grip.first, grip.stop))
            if self._moments is not None:
                places.update(place for span in grip.spans for place in span)
        for pin in sequence.pins:
            for held in pin.grips:
                places.update((held.first, held.end))
        return sorted(place for place in places if first < place < stop)

    # ---------------------------------------------------------------- inside: who

    def _all_stopped(self) -> bool:
        return all(
            self._closed[pool.group]
            or (grip.duplicate and self._moments is None and pool.window is None)
            for pool, grip in zip(self._pools, self._sequence.grips, strict=True)
        )

    def _offers(self, group: int, start: int, stop: int) -> bool:
        grip = self._sequence.grips[group]
        if not grip.holds(start, stop) or self._closed[group]:
            return False
        if self._moments is None:
            return not (grip.duplicate and self._pools[group].window is None)
        return not grip.covers(start)

    def _holders(self, group: int, start: int, stop: int) -> list[PathGrip]:
        held: list[PathGrip] = [
            pin.grips[group] for pin in self._sequence.pins if pin.grips[group].holds(start, stop)
        ]
        if self._moments is None:
            held.append(self._sequence.grips[group])
        return held

    # ---------------------------------------------------------------- inside: publishing

    def _piece(self, above: Segment, start: int, stop: int, run: RetentionRun) -> Segment:
        # Offer blocks of the path below `above`, from its end up to `stop` or a part of that.
        tokens = self._sequence.tokens
        found = self._tree.step(above, tokens, stop) if above.children else None
        if found is None:
            return self._new(above, start, stop, run)
        segment, at = found
        if at < segment.end:
            if self._only_duplicates(segment, start, at):
                # Nothing is added to this segment: divide it only to go on below.
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
            for pool, grip in zip(self._pools, sequence.grips, strict=True):
                pool.extend(above, grip.ids[start:stop])
                grip.add(above, start, stop)
            return above
        segment = self._tree.insert(above, tokens, stop - start, sequence.chain)
        self._settle(segment, start, stop, run)
        return segment

    def _may_extend(self, above: Segment, start: int, stop: int, run: RetentionRun) -> bool:
        # Whether the new blocks would be in the same state as those of `above`, in every pool. That
        # there is one holder, and that this sequence holds it, says who holds it.
        if self._moments is not None or self._sequence.pins or run.inherited or above.children:
            return False
        return all(
            grip.segment is above
            and self._offers(pool.group, start, stop)
            and pool.can_extend(above, run.retention)
            for pool, grip in zip(self._pools, self._sequence.grips, strict=True)
        )

    def _only_duplicates(self, segment: Segment, start: int, stop: int) -> bool:
        return all(
            state.ids is not None or not self._offers(group, start, stop)
            for group, state in enumerate(segment.pools)
        )

    def _settle(self, segment: Segment, start: int, stop: int, run: RetentionRun) -> None:
        # Each pool that has no primary copy of these blocks gets the sequence's.
        for pool, grip in zip(self._pools, self._sequence.grips, strict=True):
            group = pool.group
            if not self._offers(group, start, stop):
                continue
            state = segment.pools[group]
            if state.ids is not None:
                grip.duplicate = True
                continue
            ids = grip.ids[start:stop]
            holders = self._holders(group, start, stop)
            moment = 0 if self._moments is None else self._moments[group]
            retention = grip.inherited if run.inherited else run.retention
            if state.host_ids is None:
                pool.publish(segment, ids, retention, len(holders), moment)
            else:
                wanted = retention if run.requested or run.inherited else None
                pool.adopt(segment, ids, wanted, len(holders), moment)
            for holder in holders:
                holder.add(segment, start, stop)
            if self._moments is not None:
                self._given[group].add(segment, start, stop)
