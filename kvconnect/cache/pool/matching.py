"""Finds the published blocks that a new sequence can reuse."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from kvconnect.cache.pool.block_pool import BlockPool
from kvconnect.cache.tree.radix_tree import RadixTree, TokenBytes, shared_tokens
from kvconnect.cache.tree.segment import Children, Segment, Span
from kvconnect.config import KvCacheConfig
from kvconnect.keys import NamespaceId


def first_in_window(window: int | None, num_tokens: int) -> int:
    """Returns the first token that attention at position `num_tokens` reads."""
    return 0 if window is None else max(0, num_tokens - window + 1)


class PartialSource(NamedTuple):
    """A partial match: the first `num_tokens` tokens of block number `block` in `segment`."""

    segment: Segment
    block: int
    num_tokens: int


class Match(NamedTuple):
    """The published blocks of some tokens that can be reused.

    Attributes:
        segment: the segment with the last whole block; ``None`` if not even one block matches.
        num_blocks: the whole blocks from the root on; the last one may be within `segment`.
        source: the block that matches partly after them; ``None`` if there is none.
        reach: the whole blocks that would match if no snapshot of a state were missing; 0 in a
            cache without states.
    """

    segment: Segment | None
    num_blocks: int
    source: PartialSource | None
    reach: int = 0


FEW = 8
"""Up to so many candidates for a partial match are all compared."""

MANY = 512
"""If there are more, so many that were released last are compared first."""

NO_MATCH = Match(None, 0, None)

_Absent = tuple[BlockPool, list[Span]]
"""The blocks of a path that a pool lacks, as runs in order."""


class Matcher:
    """The searches in the tree and all pools. They change nothing, not even recency."""

    def __init__(self, tree: RadixTree, pools: Sequence[BlockPool], config: KvCacheConfig) -> None:
        self._tree = tree
        self._pools = pools
        self._reuse = config.enable_block_reuse
        self._partial = config.enable_partial_reuse
        self._copy = config.copy_on_partial_reuse
        self._tokens_per_block = tree.tokens_per_block
        # With full attention alone, every segment in the tree is resident, and so are those above.
        self._plain = len(pools) == 1 and pools[0].window is None
        self._attention = tuple(pool for pool in pools if not pool.is_state)
        self._has_states = len(self._attention) < len(pools)

    def match(
        self, namespace: NamespaceId, tokens: TokenBytes, limit: int, *, partial: bool = True
    ) -> Match:
        """Returns the longest match within the first `limit` tokens that every pool can serve.

        Args:
            namespace: the namespace whose tree is searched.
            tokens: the tokens as native int32 bytes.
            limit: the most tokens that may match.
            partial: whether a block may match partly; only if the configuration allows it.
        """
        root = self._tree.roots.get(namespace) if self._reuse else None
        if root is None:
            return NO_MATCH
        segment, at = self._tree.walk(root, tokens, limit // self._tokens_per_block)
        look_for_part = partial and self._partial
        if self._has_states:
            # A state is at the end of a whole block, so no block can be reused in part.
            reach = self._usable(segment, at, b"", 0, self._attention).num_blocks
            return self._usable(segment, reach, b"", 0, self._pools)._replace(reach=reach)
        if not self._plain:
            return self._usable(segment, at, tokens, limit if look_for_part else 0, self._pools)
        source = self._part_at(segment, at, tokens, limit) if look_for_part else None
        return Match(segment if at else None, at, source)

    def usable_blocks(self, segment: Segment, at: int) -> int:
        """Returns how many leading blocks of the path to `segment` every pool can serve.

        At most the first `at` blocks count.
        """
        return at if self._plain else self._usable(segment, at, b"", 0, self._pools).num_blocks

    # ---------------------------------------------------------------- several pools, or windows

    def _usable(
        self,
        segment: Segment,
        at: int,
        tokens: TokenBytes,
        limit: int,
        pools: Sequence[BlockPool],
    ) -> Match:
        # From the deepest block upwards, where a partial match reaches furthest.
        absent = [(pool, _absent_runs(pool.group, segment, at)) for pool in pools]
        size = self._tokens_per_block
        while True:
            while segment.parent is not None and segment.start >= at:
                segment = segment.parent
            source = self._part_at(segment, at, tokens, limit) if limit else None
            if source is not None and self._served(absent, at, at * size + source.num_tokens):
                return Match(segment if at else None, at, source)
            if self._served(absent, at, at * size):
                return Match(segment if at else None, at, None)
            at = self._next_length(absent, at)

    def _served(self, absent: list[_Absent], at: int, num_tokens: int) -> bool:
        # Returns whether every pool has those of the first `at` blocks that `num_tokens` reads.
        return all(
            not runs
            or runs[0][0] >= at
            or _last_before(runs, at)[1] <= self._first_block(pool, num_tokens)
            for pool, runs in absent
        )

    def _next_length(self, absent: list[_Absent], at: int) -> int:
        # Returns the next shorter length to try. A gap within the window of every length down to
        # the gap's start excludes those lengths.
        size = self._tokens_per_block
        lengths = [at - 1]
        for pool, runs in absent:
            if not runs or runs[0][0] >= at:
                continue
            start, stop = _last_before(runs, at)
            if pool.is_state:
                lengths.append(start if stop == at else at)
                continue
            if stop <= self._first_block(pool, at * size + size - 1):
                continue
            if pool.window is None:
                lengths.append(runs[0][0])
            elif pool.window > size:
                lengths.append(start)
        return min(lengths)

    def _first_block(self, pool: BlockPool, num_tokens: int) -> int:
        return first_in_window(pool.window, num_tokens) // self._tokens_per_block

    # ---------------------------------------------------------------- partial matches

    def _part_at(
        self, segment: Segment, at: int, tokens: TokenBytes, limit: int
    ) -> PartialSource | None:
        # The block after the first `at` blocks of this path that shares most of the next tokens.
        size = self._tree.stride
        rest = bytes(tokens[at * size : min(4 * limit, (at + 1) * size)])
        if not rest:
            return None
        if at >= segment.end:
            return self._part_of_child(segment, rest)
        low = (at - segment.start) * size
        shared = shared_tokens(rest, bytes(segment.tokens[low : low + size]))
        return PartialSource(segment, at, shared) if shared and self._may_use(segment, at) else None

    def _part_of_child(self, segment: Segment, rest: bytes) -> PartialSource | None:
        # Children that share the first k tokens are neighbours. Each round tries those that share
        # fewer tokens than the round before, until one may be used.
        children = segment.children
        before, after = children.beside(rest, rest)
        while shared := max(shared_tokens(rest, before), shared_tokens(rest, after)):
            prefix = rest[: 4 * shared]
            best = self._best_of(children, prefix)
            if best is not None:
                return PartialSource(best, best.start, shared)
            before, after = children.beside(prefix, prefix + b"\xff" * self._tree.stride)
        return None

    def _best_of(self, children: Children, prefix: bytes) -> Segment | None:
        # Returns the best child begun by `prefix`. All prompts may begin with the same few tokens:
        # among many children, the best is probably one of those released last.
        candidates = children.begun_by(prefix)
        few = list(islice(candidates, FEW))
        if len(few) == FEW:
            for child in children.latest(prefix, MANY):
                state = child.pools[0]
                if state.ids is not None and state.stamp > 0 and self._may_use(child, child.start):
                    return child
            few.extend(candidates)
        usable = [child for child in few if self._may_use(child, child.start)]
        return max(usable, key=_preference, default=None)

    def _may_use(self, segment: Segment, block: int) -> bool:
        if not self._copy and (segment.children or block != segment.end - 1):
            return False
        for pool in self._pools:
            state = segment.pools[pool.group]
            if not self._copy and state.references:
                return False
            if not state.is_resident and pool.window != 1:
                return False
        return True


def _absent_runs(group: int, segment: Segment, at: int) -> list[Span]:
    """Returns which of the first `at` blocks of the path to `segment` the pool lacks, in order."""
    runs: list[Span] = []
    stop = at
    step: Segment | None = segment
    while step is not None and step.parent is not None:
        if step.start < at and not step.pools[group].is_resident:
            if runs and runs[-1][0] == stop:
                runs[-1] = (step.start, runs[-1][1])
            else:
                runs.append((step.start, stop))
        stop = min(stop, step.start)
        step = step.parent
    runs.reverse()
    return runs


def _last_before(runs: list[Span], at: int) -> Span:
    """Returns the last run that begins before `at`, cut off at `at`. There must be one."""
    start, stop = next(run for run in reversed(runs) if run[0] < at)
    return start, min(stop, at)


def _preference(segment: Segment) -> tuple[bool, int]:
    state = segment.pools[0]
    return state.ids is not None, state.stamp
