"""Decides whether a prompt fits, and which blocks it would reuse and allocate."""

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
from kvconnect.errors import ConfigurationError
from kvconnect.keys import KeyChain


class Demand(NamedTuple):
    """The blocks that a new sequence takes from one pool.

    Attributes:
        first: the number of the first block that the sequence holds.
        stop: the blocks from this number on are reserved by later chunks.
        onboard: how many matched blocks are onboarded from the host, each into a fresh one.
        fresh: how many blocks are allocated, those for `onboard` included.
        claimed: how many unreferenced blocks the sequence references, which are then not free.
    """

    first: int
    stop: int
    onboard: int
    fresh: int
    claimed: int


class AdmissionPlan(NamedTuple):
    """The blocks that a new sequence reuses and allocates.

    Attributes:
        match: the published blocks that the sequence reuses.
        num_matched: the tokens in `match`.
        begin: where computing begins: after the match, or after what a store will fill.
        reserved: the leading tokens that the sequence gets blocks for in every pool.
        load_end: the end of what a store will fill while the tokens before it are computed; 0:
            there is no such load, or all pools are of full attention.
        demands: the demand on each pool, by pool group.
        moves: the slabs that change pools first.
    """

    match: Match
    num_matched: int
    begin: int
    reserved: int
    demands: Items[Demand]
    moves: Collection[SlabMove] = ()
    load_end: int = 0


class Planner:
    """Plans admissions. A plan is valid until anything changes."""

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
        self._any_window = any(pool.window is not None and not pool.is_state for pool in pools)
        self._has_states = any(pool.is_state for pool in pools)

    def num_matched(self, prompt: Prompt) -> int:
        """Returns how many tokens of `prompt` are published, even if the rest does not fit."""
        return self._num_tokens(self._match(prompt))

    def plan(self, prompt: Prompt, keys: KeyChain | None = None) -> AdmissionPlan | None:
        """Returns how `prompt` would be admitted now, or ``None`` if it does not fit.

        If a partial match does not fit, the longest match of whole blocks is used instead. If the
        tree has a key index, `keys` gets the keys of the matched blocks from the index.
        """
        # Computing beside a load begins at the end of a block.
        match = self._match(prompt, partial=not prompt.beside)
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
        beside = prompt.beside and (self._any_window or self._has_states)
        if beside:
            reserved = begin  # `reserve` is for the tokens that are computed beside the load
        if self._has_states and begin % self._tokens_per_block:
            raise ConfigurationError(
                f"external_end: {begin} must be a multiple of tokens_per_block="
                f"{self._tokens_per_block}, since states are kept at ends of blocks only"
            )
        demands = []
        needs = []
        for pool in self._pools:
            stop = num_tokens if pool.window is None else reserved
            if pool.is_state:
                stop = begin  # the block that ends there; snapshots get theirs when they are taken
            demand = self._demand(
                pool, match, begin, stop, computed=num_matched if beside else begin
            )
            demands.append(demand)
            needs.append(demand.fresh + demand.claimed)
        moves = self._slabs.plan(needs)
        if moves is None:
            return None
        if beside:
            return AdmissionPlan(match, num_matched, begin, num_matched, demands, moves, begin)
        return AdmissionPlan(match, num_matched, begin, reserved, demands, moves)

    def _demand(
        self, pool: BlockPool, match: Match, begin: int, reserved: int, *, computed: int
    ) -> Demand:
        size = self._tokens_per_block
        first = first_in_window(pool.window, computed) // size
        stop = -(-reserved // size)
        fresh = stop - max(first_in_window(pool.window, begin) // size, match.num_blocks)
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
                break  # a holder of these blocks also holds all blocks before them
            end = step.start
            step = step.parent
        if match.source is not None:
            # Admission references the source in every pool, also where it lies before the window.
            state = match.source.segment.pools[pool.group]
            if state.ids is not None and state.references == 0:
                claimed += 1
                if first <= match.num_blocks and not self._copy:
                    fresh -= 1
        return Demand(first, stop, onboard, fresh + onboard, claimed)
