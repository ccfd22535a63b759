"""Decides whether a new sequence fits, and gives it its blocks."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from kvconnect.cache.block_pool import BlockPool
from kvconnect.cache.radix_tree import Match, RadixTree, TokenBytes
from kvconnect.cache.segment import Segment
from kvconnect.cache.sequence import Sequence
from kvconnect.config import KvCacheConfig
from kvconnect.keys import Namespace

__all__ = ["Admission", "AdmissionPlan", "CopyTokens"]


class CopyTokens(Protocol):
    """The one order that admission gives to a copier."""

    def __call__(self, source: int, target: int, num_tokens: int, /) -> None:
        """Copy the first `num_tokens` tokens of block `source` to block `target`, in all layers."""


class AdmissionPlan(NamedTuple):
    """What a sequence reuses, and how many blocks it needs in all."""

    match: Match
    num_blocks: int


class Admission:
    """Matching, claiming and allocating for new sequences (specification: using a match)."""

    def __init__(self, tree: RadixTree, pool: BlockPool, config: KvCacheConfig) -> None:
        self._tree = tree
        self._pool = pool
        self._reuse = config.enable_block_reuse
        self._partial = config.enable_partial_reuse
        self._copy = config.copy_on_partial_reuse
        self._tokens_per_block = config.tokens_per_block

    def match(self, namespace: Namespace, tokens: TokenBytes, limit: int) -> Match:
        """What is published of the first `limit` of `tokens`. Changes nothing."""
        if not self._reuse:
            return Match(None, 0, None)
        return self._tree.match(namespace, tokens, limit, partial=self._partial, copy=self._copy)

    def num_matched(self, match: Match) -> int:
        """Tokens of `match`."""
        partial = match.source.num_tokens if match.source is not None else 0
        return match.num_blocks * self._tokens_per_block + partial

    def plan(self, namespace: Namespace, tokens: TokenBytes, limit: int) -> AdmissionPlan | None:
        """How `tokens` would be admitted, matching at most `limit`; ``None``: not now.

        Changes nothing. A partial match whose source would have to make room for the rest is given
        up.
        """
        num_tokens = len(tokens) // 4
        match = self.match(namespace, tokens, limit)
        num_blocks = -(-num_tokens // self._tokens_per_block)
        spare = self._pool.num_free - _unreferenced(match) - (num_blocks - match.num_blocks)
        source = match.source
        if source is not None and self._copy and source.segment.references == 0 and spare < 1:
            # The source would have to stay beside its copy until that is made.
            match = match._replace(source=None)
        return AdmissionPlan(match, num_blocks) if spare >= 0 else None

    def admit(self, sequence: Sequence, plan: AdmissionPlan, copy_tokens: CopyTokens) -> None:
        """Give `sequence` its blocks; `plan` was made just now."""
        segment, num_matched, source = plan.match
        if segment is not None:
            if num_matched < segment.end:
                segment = self._tree.split(segment, num_matched)
            self._claim(sequence, segment)
        sequence.matched = sequence.computed = self.num_matched(plan.match)
        num_fresh = plan.num_blocks - num_matched
        if source is None:
            sequence.ids.extend(self._pool.allocate(num_fresh))
            return
        single = source.segment
        if single.end > source.block + 1:
            single = self._tree.split(single, source.block + 1)
        sequence.plan.inherit(source.block, self._pool.effective_retention(single))
        if not self._copy:
            sequence.ids.extend(self._pool.take(single))
            sequence.ids.extend(self._pool.allocate(num_fresh - 1))
            return
        self._pool.protect(single)
        sequence.ids.extend(self._pool.allocate(num_fresh))
        copy_tokens(single.ids[0], sequence.ids[source.block], source.num_tokens)
        self._pool.used(single)

    def _claim(self, sequence: Sequence, segment: Segment) -> None:
        self._pool.claim(segment)
        path = segment.path()
        for step in path:
            sequence.ids.extend(step.ids)
        for run in sequence.plan.requested(0, segment.end):
            # A segment that is divided here leaves its parts in the tree, not in `path`: the runs
            # are in order and apart, so what is left of it is always the part that comes next.
            for step in path:
                if step.start < run.stop and run.start < step.end:
                    self._pool.retain(step, run)
        sequence.segment, sequence.published = segment, segment.end


def _unreferenced(match: Match) -> int:
    """Blocks of the match that nobody references yet: claiming takes them from the free ones."""
    step, stop, count = match.segment, match.num_blocks, 0
    while step is not None and step.references == 0 and step.parent is not None:
        count += stop - step.start
        step, stop = step.parent, step.start
    return count
