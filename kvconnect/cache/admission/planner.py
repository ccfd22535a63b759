"""Decides whether a prompt fits, and what it would reuse and take. Changes nothing."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Items
from typing import NamedTuple

from kvconnect.cache.admission.prompt import Prompt
from kvconnect.cache.pool.block_pool import BlockPool
from kvconnect.cache.pool.matching import Match, Matcher, first_in_window
from kvconnect.cache.pool.slabs import SlabMove, Slabs
from kvconnect.cache.tree.radix_tree import RadixTree
from kvconnect.config import KvCacheConfig
from kvconnect.keys import KeyChain

__all__ = ["AdmissionPlan", "Demand", "Planner"]


class Demand(NamedTuple):
    """What a new sequence takes from one pool.

    Attributes:
        first: number of the first block that it holds.
        stop: the blocks from it on are for later chunks.
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


class Planner:
    """Plans admissions. A plan is good until anything changes."""

    def __init__(
        self,
        tree: RadixTree,
        pools: Items[BlockPool],
        matcher: Matcher,
        *,
        slabs: Slabs,
        config: KvCacheConfig,
    ) -> None:
        self._tree = tree
        self._pools = pools
        self._matcher = matcher
        self._slabs = slabs
        self._copy = config.copy_on_partial_reuse
        self._tokens_per_block = config.tokens_per_block
        self._any_window = any(pool.window is not None for pool in pools)

    def num_matched(self, prompt: Prompt) -> int:
        """Tokens that could be reused, whether the rest fits or not."""
        return self._num_tokens(self._match(prompt))

    def plan(self, prompt: Prompt, keys: KeyChain | None = None) -> AdmissionPlan | None:
        """How `prompt` would be admitted now; ``None``: not now.

        A partial match that does not fit is given up for the longest whole one. `keys` learn those
        of the match, where a search by key was made before.
        """
        match = self._match(prompt)
        plan = self._plan(prompt, match)
        if plan is None and match.source is not None:
            match = self._match(prompt, partial=False)
            plan = self._plan(prompt, match)
        index, segment = self._tree.index, match.segment
        if plan is not None and keys is not None and index is not None and segment is not None:
            index.teach(keys, segment, match.num_blocks)
        return plan

    def _match(self, prompt: Prompt, *, partial: bool = True) -> Match:
        limit = prompt.num_tokens - 1
        if prompt.max_matched is not None:
            limit = min(limit, prompt.max_matched)
        return self._matcher.match(prompt.namespace, prompt.tokens, limit, partial=partial)

    def _num_tokens(self, match: Match) -> int:
        partial = match.source.num_tokens if match.source is not None else 0
        return match.num_blocks * self._tokens_per_block + partial

    def _plan(self, prompt: Prompt, match: Match) -> AdmissionPlan | None:
        num_matched = self._num_tokens(match)
        num_tokens = reserved = prompt.num_tokens
        begin = num_matched
        if prompt.external_end is not None:
            begin = max(begin, prompt.external_end)
        if self._any_window and prompt.first_chunk is not None:
            reserved = min(reserved, begin + prompt.first_chunk)
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
                break  # a holder of these holds all before them
            end = step.start
            step = step.parent
        if match.source is not None:
            # Admission holds it in every pool, also where the window has left it behind.
            state = match.source.segment.pools[pool.group]
            if state.ids is not None and state.references == 0:
                claimed += 1
                if first <= match.num_blocks and not self._copy:
                    fresh -= 1
        return Demand(first, stop, onboard, fresh + onboard, claimed)
