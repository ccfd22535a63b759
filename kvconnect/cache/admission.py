"""Decides whether a new sequence fits, and gives it its blocks (specification: using a match)."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Items
from typing import NamedTuple

from kvconnect.cache.block_pool import BlockPool
from kvconnect.cache.copier import BlockCopier
from kvconnect.cache.matching import Match, Matcher, PartialSource, first_in_window
from kvconnect.cache.radix_tree import RadixTree, TokenBytes
from kvconnect.cache.retention import DEFAULT_RETENTION, RetentionRun
from kvconnect.cache.segment import BlockIds, Segment
from kvconnect.cache.sequence import Grip, Sequence, no_ids
from kvconnect.cache.slabs import SlabMove, Slabs
from kvconnect.config import KvCacheConfig
from kvconnect.keys import Namespace

__all__ = ["Admission", "AdmissionPlan", "Demand", "Request"]


class Demand(NamedTuple):
    """What a new sequence takes from one pool.

    Attributes:
        first: place of the first block that it holds.
        stop: places from it on are for later chunks.
        onboard: matched blocks that come back from the host, each into a fresh one.
        fresh: blocks to allocate, those included.
        claimed: blocks that are free so far, and that it keeps from being reclaimed.
    """

    first: int
    stop: int
    onboard: int
    fresh: int
    claimed: int


class AdmissionPlan(NamedTuple):
    """What a sequence reuses and takes.

    Attributes:
        match: what it reuses.
        num_matched: the same in tokens.
        reserved: leading tokens that it gets blocks for.
        demands: by pool group.
        moves: memory that changes pools before.
    """

    match: Match
    num_matched: int
    reserved: int
    demands: Items[Demand]
    moves: Collection[SlabMove] = ()


class Request(NamedTuple):
    """What `BlockManager.add_sequence` was asked for.

    Attributes:
        namespace: whose blocks may be reused.
        tokens: as bytes.
        max_matched: reuse at most so many tokens.
        first_chunk: window pools hold blocks for so many tokens to be computed.
        external_end: leading tokens that somebody fills before any is computed.
    """

    namespace: Namespace
    tokens: TokenBytes
    max_matched: int | None = None
    first_chunk: int | None = None
    external_end: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.tokens) // 4


class Admission:
    """Plans, claims and allocates for new sequences."""

    def __init__(
        self,
        tree: RadixTree,
        pools: Items[BlockPool],
        matcher: Matcher,
        slabs: Slabs,
        config: KvCacheConfig,
        copier: BlockCopier | None,
    ) -> None:
        self._tree = tree
        self._pools = pools
        self._matcher = matcher
        self._slabs = slabs
        self._copier = copier
        self._copy = config.copy_on_partial_reuse
        self._tokens_per_block = config.tokens_per_block
        self._any_window = any(pool.window is not None for pool in pools)

    # ---------------------------------------------------------------- plans: these change nothing

    def match(self, request: Request, *, partial: bool = True) -> Match:
        """What could be reused, whether the rest fits or not; `partial`: also a part of a block."""
        limit = request.num_tokens - 1
        if request.max_matched is not None:
            limit = min(limit, request.max_matched)
        return self._matcher.match(request.namespace, request.tokens, limit, partial=partial)

    def num_matched(self, match: Match) -> int:
        """Tokens of `match`."""
        partial = match.source.num_tokens if match.source is not None else 0
        return match.num_blocks * self._tokens_per_block + partial

    def plan(self, request: Request) -> AdmissionPlan | None:
        """How the request would be admitted now; ``None``: not now.

        A partial match that does not fit is given up for the longest whole one.
        """
        match = self.match(request)
        plan = self._plan(request, match)
        if plan is None and match.source is not None:
            whole = self.match(request, partial=False)
            plan = self._plan(request, whole)
        return plan

    def _plan(self, request: Request, match: Match) -> AdmissionPlan | None:
        num_matched = self.num_matched(match)
        num_tokens = reserved = request.num_tokens
        begin = num_matched
        if request.external_end is not None:
            begin = max(begin, request.external_end)
        if self._any_window and request.first_chunk is not None:
            reserved = min(reserved, begin + request.first_chunk)
        demands = []
        needs = []
        for pool in self._pools:
            stop = num_tokens if pool.window is None else reserved
            demand = self._demand(pool, match, begin, stop)
            demands.append(demand)
            needs.append(demand.fresh + demand.claimed)
        moves = self._slabs.plan(needs)
        if moves is None:
            return None
        return AdmissionPlan(match, num_matched, reserved, demands, moves)

    def _demand(self, pool: BlockPool, match: Match, begin: int, reserved: int) -> Demand:
        first = first_in_window(pool.window, begin) // self._tokens_per_block
        stop = -(-reserved // self._tokens_per_block)
        fresh = stop - max(first, match.num_blocks)
        onboard = claimed = 0
        step = match.segment
        end = match.num_blocks
        while step is not None and end > first:
            state = step.pools[pool.group]
            count = end - max(step.start, first)
            if state.ids is None:
                onboard += count
            elif state.references == 0:
                claimed += count
            elif pool.window is None:
                break  # whoever holds these holds all before them
            end = step.start
            step = step.parent
        if match.source is not None and first <= match.num_blocks:
            state = match.source.segment.pools[pool.group]
            if state.ids is not None and state.references == 0:
                claimed += 1
                fresh -= 0 if self._copy else 1
        return Demand(first, stop, onboard, fresh + onboard, claimed)

    # ---------------------------------------------------------------- carrying a plan out

    def admit(self, sequence: Sequence, plan: AdmissionPlan) -> None:
        """Give `sequence` its blocks; `plan` was made just now.

        Claims come first, in all pools, so that no allocation evicts what is about to be used.
        """
        at = plan.match.num_blocks
        segment = plan.match.segment
        if segment is not None:
            if at < segment.end:
                segment = self._tree.split(segment, at)
            for grip, demand in zip(sequence.grips, plan.demands, strict=True):
                self._claim(grip, segment, demand.first)
        source = self._hold_source(plan.match.source)
        if plan.moves:
            self._slabs.carry_out(plan.moves)
        num_blocks = -(-sequence.num_tokens // self._tokens_per_block)
        for grip, demand in zip(sequence.grips, plan.demands, strict=True):
            self._fill(grip, demand, num_blocks)
        if source is not None:
            self._use_source(sequence, plan, source)
        if segment is not None:
            for run in sequence.plan.requested(0, at):
                self._retain(sequence, segment, run)
        sequence.matched = sequence.computed = plan.num_matched
        sequence.offered = at
        sequence.reserved = plan.reserved

    def _claim(self, grip: Grip, segment: Segment, first: int) -> None:
        if first >= segment.end:
            return
        if first:
            step = segment
            while step.start > first and step.parent is not None:
                step = step.parent
            if step.start < first:
                self._tree.split(step, first)
        grip.add(segment, first, segment.end)
        grip.claim()

    def _fill(self, grip: Grip, demand: Demand, num_blocks: int) -> None:
        # Its ids: none before the window, what was claimed, what is fresh, none for what comes
        # later. In the place of a source that is taken over, for now none.
        pool = grip.pool
        fresh = pool.allocate(demand.fresh)
        grip.first, grip.stop = demand.first, demand.stop
        grip.ids = ids = no_ids(num_blocks)
        if grip.segment is not None:
            path = grip.segment.path(demand.first)
            if demand.onboard:
                self._onboard(path, pool, fresh[: demand.onboard])
                del fresh[: demand.onboard]
            for segment in path:
                own = segment.pools[pool.group].ids
                if own is not None:
                    ids[segment.start : segment.end] = own
        ids[demand.stop - len(fresh) : demand.stop] = fresh

    def _onboard(self, path: list[Segment], pool: BlockPool, ids: BlockIds) -> None:
        at = 0
        for segment in path:
            state = segment.pools[pool.group]
            if state.ids is None and state.host_ids is not None:
                part = ids[at : at + len(segment)]
                at += len(segment)
                if self._copier is not None:
                    self._copier.onboard(pool.group, state.host_ids, part)
                pool.published.adopt(segment, part, None, 0)

    def _retain(self, sequence: Sequence, segment: Segment, run: RetentionRun) -> None:
        # From the end of the path upwards: a part that is split off keeps what is below it valid.
        step: Segment | None = segment
        while step is not None and step.end > run.start:
            pools = [
                grip.pool
                for grip in sequence.grips
                if step.start >= grip.first and grip.pool.published.differs(step, run.retention)
            ]
            if pools and step.start < run.stop:
                if run.stop < step.end:
                    step = self._tree.split(step, run.stop)
                if step.start < run.start:
                    self._tree.split(step, run.start)
                for pool in pools:
                    pool.published.retain(step, run.retention)
            step = step.parent

    # ---------------------------------------------------------------- the partial source

    def _hold_source(self, source: PartialSource | None) -> Segment | None:
        # Divide it off, and keep it from being reclaimed; now its segment is just that block.
        if source is None:
            return None
        segment = source.segment
        if segment.start < source.block:
            self._tree.split(segment, source.block)
        if segment.end > source.block + 1:
            segment = self._tree.split(segment, source.block + 1)
        for pool in self._pools:
            if segment.pools[pool.group].is_resident:
                pool.published.reference(segment)
        return segment

    def _use_source(self, sequence: Sequence, plan: AdmissionPlan, source: Segment) -> None:
        block = source.start
        num_tokens = plan.num_matched - block * self._tokens_per_block
        for grip in sequence.grips:
            pool = grip.pool
            state = source.pools[pool.group]
            if not state.is_resident:
                continue
            grip.inherited = pool.published.effective_retention(source)
            if pool.host is not None or grip.inherited != DEFAULT_RETENTION:
                # Else it has the default anyway, and there is no copy for that to be set on.
                sequence.plan.inherit(block)
            if self._copy:
                if grip.first <= block:
                    self._copy_part(pool, source, grip.ids[block], num_tokens)
                pool.published.dereference(source, pool.published.next_moment())
            else:
                self._take_over(grip, source)

    def _copy_part(self, pool: BlockPool, source: Segment, target: int, num_tokens: int) -> None:
        state = source.pools[pool.group]
        ids = state.host_ids if state.ids is None else state.ids
        if self._copier is not None and ids is not None:
            self._copier.copy_tokens(
                pool.group, ids[0], target, num_tokens, from_host=state.ids is None
            )

    def _take_over(self, grip: Grip, source: Segment) -> None:
        # The block becomes the sequence's own; where it does not need it, it becomes blank.
        pool = grip.pool
        state = source.pools[pool.group]
        place = source.start
        if grip.first > place:
            pool.private.drop(pool.take(source))
        elif state.ids is not None:
            grip.ids[place] = pool.take(source)[0]
        else:
            if self._copier is not None and state.host_ids is not None:
                self._copier.onboard(pool.group, state.host_ids, grip.ids[place : place + 1])
            pool.take(source)
