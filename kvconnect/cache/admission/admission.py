"""Admits a new sequence: reuses the matched blocks, and allocates the others."""

from __future__ import annotations

from collections.abc import Sequence as Items

from kvconnect.cache.admission.planner import AdmissionPlan, Demand, Planner
from kvconnect.cache.admission.prompt import Prompt
from kvconnect.cache.memory.copier import BlockCopier
from kvconnect.cache.pool.block_pool import BlockPool
from kvconnect.cache.pool.held_blocks import HeldBlocks, no_ids
from kvconnect.cache.pool.matching import PartialSource
from kvconnect.cache.pool.slabs import Slabs
from kvconnect.cache.sequence.sequence import Sequence
from kvconnect.cache.tree.radix_tree import RadixTree
from kvconnect.cache.tree.retention import DEFAULT_RETENTION, RetentionPlan, RetentionRun
from kvconnect.cache.tree.segment import Segment
from kvconnect.config import KvCacheConfig, KvCacheRetentionConfig
from kvconnect.errors import OutOfBlocks
from kvconnect.keys import KeyChain


class Admission:
    """Admits sequences: references the blocks that a plan reuses, and allocates the others.

    Attributes:
        no_state_tokens: the tokens of all sequences that had their keys and values in the cache,
            and were not matched, since the snapshot of the states at their end was missing.
    """

    def __init__(
        self,
        tree: RadixTree,
        pools: Items[BlockPool],
        planner: Planner,
        *,
        slabs: Slabs,
        config: KvCacheConfig,
        copier: BlockCopier | None,
    ) -> None:
        self._tree = tree
        self._pools = pools
        self._planner = planner
        self._slabs = slabs
        self._copier = copier
        self._copy = config.copy_on_partial_reuse
        self._tokens_per_block = config.tokens_per_block
        self.no_state_tokens = 0
        self._has_states = any(pool.is_state for pool in pools)

    def admit(
        self, prompt: Prompt, retention: KvCacheRetentionConfig | None, keys: KeyChain | None
    ) -> Sequence:
        """Returns a new sequence that holds the blocks for `prompt`.

        Reuses published blocks, and may reclaim others and order copies. `retention` and `keys` are
        as for `BlockManager.add_sequence`.

        Raises:
            OutOfBlocks: there are not enough blocks; nothing changed.
        """
        plan = self._planner.plan(prompt, keys)
        if plan is None:
            needed = -(-prompt.num_tokens // self._tokens_per_block)
            free = self._slabs.free_blocks()
            raise OutOfBlocks(f"{needed} blocks are needed, less what is shared; {free}")
        wanted = RetentionPlan(retention, prompt.num_tokens, self._tokens_per_block)
        held = [HeldBlocks(pool) for pool in self._pools]
        sequence = Sequence(prompt.namespace, prompt.tokens, wanted, keys, held)
        self._carry_out(sequence, plan)
        if self._has_states:
            self._note_states(sequence, plan)
        if keys is not None and prompt.namespace in self._tree.roots:
            self._tree.root(prompt.namespace, keys.root)
        return sequence

    def _note_states(self, sequence: Sequence, plan: AdmissionPlan) -> None:
        size = self._tokens_per_block
        reach = plan.match.reach * size
        sequence.no_state_tokens = max(reach - plan.begin, 0)
        self.no_state_tokens += sequence.no_state_tokens
        # A repeat of the prompt matches all but its last token at most.
        sequence.state_ends = (reach, (sequence.num_tokens - 1) // size * size)

    def _carry_out(self, sequence: Sequence, plan: AdmissionPlan) -> None:
        # All pools reference the reused blocks first, so that no allocation evicts one of them.
        at = plan.match.num_blocks
        segment = plan.match.segment
        if segment is not None:
            if at < segment.end:
                segment = self._tree.split(segment, at)
            for held, demand in zip(sequence.held, plan.demands, strict=True):
                self._claim(held, segment, demand.first)
        source = self._hold_source(plan.match.source)
        if plan.moves:
            self._slabs.carry_out(plan.moves)
        num_blocks = -(-sequence.num_tokens // self._tokens_per_block)
        for held, demand in zip(sequence.held, plan.demands, strict=True):
            self._claim_ids(held, demand, num_blocks)
            wanted = demand.fresh - demand.onboard
            if source is not None and self._comes_from_host(held, source):
                # The source's host block becomes blank before a block is reclaimed for later ones.
                self._inherit(sequence, held, source)
                held.ids[source.start] = held.pool.allocate(1)[0]
                self._take_over(held, source)
                wanted -= 1
            fresh = held.pool.allocate(wanted)
            held.ids[demand.stop - len(fresh) : demand.stop] = fresh
        if source is not None:
            self._use_source(sequence, plan, source)
        if segment is not None:
            for run in sequence.plan.requested(0, at):
                self._retain(sequence, segment, run)
        sequence.matched = sequence.computed = plan.num_matched
        sequence.attempted = at
        sequence.reserved, sequence.load_end = plan.reserved, plan.load_end

    def _claim(self, held: HeldBlocks, segment: Segment, first: int) -> None:
        if first >= segment.end:
            return
        if first:
            step = segment
            while step.start > first and step.parent is not None:
                step = step.parent
            if step.start < first:
                self._tree.split(step, first)
        held.add(segment, first, segment.end)
        held.claim()

    def _claim_ids(self, held: HeldBlocks, demand: Demand, num_blocks: int) -> None:
        # The ids: `NOT_HELD` before the window, then the claimed ones. Fresh ones are set later.
        pool = held.pool
        held.first, held.stop = demand.first, demand.stop
        held.ids = ids = no_ids(num_blocks)
        if held.segment is not None:
            path = held.segment.path(demand.first)
            if demand.onboard:
                for segment in path:
                    if segment.pools[pool.group].ids is None:
                        pool.onboard(segment)
                path = held.segment.path(demand.first)
            for segment in path:
                own = segment.pools[pool.group].ids
                if own is not None:
                    ids[segment.start : segment.end] = own

    def _retain(self, sequence: Sequence, segment: Segment, run: RetentionRun) -> None:
        # From the end of the path upwards, since `split` leaves the segments below unchanged.
        step: Segment | None = segment
        while step is not None and step.end > run.start:
            pools = [
                held.pool
                for held in sequence.held
                if step.start >= held.first and held.pool.published.differs(step, run.retention)
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
        # Splits the block off as a segment of its own, and references it against reclaiming.
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
        for held in sequence.held:
            pool = held.pool
            state = source.pools[pool.group]
            if not state.is_resident:
                continue
            self._inherit(sequence, held, source)
            if self._copy:
                if held.first <= block:
                    self._copy_part(pool, source, held.ids[block], num_tokens)
                pool.published.dereference(source, pool.published.next_moment())
            else:
                self._take_over(held, source)

    def _comes_from_host(self, held: HeldBlocks, source: Segment) -> bool:
        state = source.pools[held.pool.group]
        needed = held.first <= source.start
        return not self._copy and needed and state.is_resident and state.ids is None

    def _inherit(self, sequence: Sequence, held: HeldBlocks, source: Segment) -> None:
        held.inherited = held.pool.published.effective_retention(source)
        if held.pool.host.num_blocks or held.inherited != DEFAULT_RETENTION:
            # Otherwise the block has the default in any case, and no copy that must get it.
            sequence.plan.inherit(source.start)

    def _copy_part(self, pool: BlockPool, source: Segment, target: int, num_tokens: int) -> None:
        state = source.pools[pool.group]
        ids = state.host_ids if state.ids is None else state.ids
        if self._copier is not None and ids is not None:
            self._copier.copy_tokens(
                pool.group, ids[0], target, num_tokens, from_host=state.ids is None
            )

    def _take_over(self, held: HeldBlocks, source: Segment) -> None:
        # Makes the block the sequence's own, or blank where the sequence does not need it.
        pool = held.pool
        state = source.pools[pool.group]
        block = source.start
        if held.first > block:
            pool.private.drop(pool.take(source))
        elif state.ids is not None:
            held.ids[block] = pool.take(source)[0]
        else:
            if self._copier is not None and state.host_ids is not None:
                self._copier.onboard(pool.group, state.host_ids, held.ids[block : block + 1])
            pool.take(source)
