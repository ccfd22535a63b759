"""Prompts that begin alike: one computes what they have in common, the others wait and reuse it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from kvconnect.cache.resource_manager import BaseKVCacheManager
from kvconnect.keys import BlockKey
from kvconnect.request import LlmRequest
from kvconnect.tokens import common_length

__all__ = ["CommonPrefixes"]


class _Beginning(NamedTuple):
    """What two prompts must have in common to share any block: the namespace and one block."""

    root: BlockKey
    tokens: bytes


class CommonPrefixes:
    """The prompts that one step computes, by what they begin with.

    A request is held back only for one that computes in this very step, and that one's chunk ends
    where their prompts part: so it waits for their common tokens alone to be computed, and never
    for anything that may not come. Held back, it has no blocks.

    Args:
        kv: publishes what a step computed, and says what a request could reuse then.
        enabled: else nothing is held back, and no chunk ends early.
    """

    def __init__(self, kv: BaseKVCacheManager, *, enabled: bool = True) -> None:
        self._kv = kv
        self._enabled = enabled
        self._computing: defaultdict[_Beginning | None, list[LlmRequest]] = defaultdict(list)
        self._ends: dict[int, int] = {}

    def add(self, requests: Iterable[LlmRequest]) -> None:
        """`requests` compute tokens of their prompts in this step."""
        if not self._enabled:
            return
        for request in requests:
            if (beginning := _beginning(request)) is not None:
                self._computing[beginning].append(request)

    def discard(self, requests: Iterable[LlmRequest]) -> None:
        """None of `requests` computes in this step after all."""
        for request in requests:
            others = self._computing.get(_beginning(request), [])
            if request in others:
                others.remove(request)

    def hold_back(self, request: LlmRequest) -> bool:
        """Whether `request`, which waits, could reuse more after this step; then it is to wait.

        The one that computes those tokens gets an `end`.
        """
        beginning = _beginning(request)
        others = () if beginning is None else self._computing.get(beginning, ())
        end, first = 0, None
        for other in others:
            common = _common_blocks(request, other)
            if common > max(end, other.num_computed_tokens):
                end, first = common, other
        if first is None:
            return False
        if self._kv.reusable_tokens(request, end) <= self._kv.reusable_tokens(request):
            return False
        number = first.request_id
        self._ends[number] = min(end, self._ends.get(number, end))
        return True

    def end(self, request: LlmRequest, start: int) -> int:
        """Where the chunk of `request` from token `start` on is to end.

        That is before its last token if another waits for what comes before.
        """
        end = self._ends.get(request.request_id, 0)
        return end if end > start else request.num_tokens


def _beginning(request: LlmRequest) -> _Beginning | None:
    chain = request.key_chain
    if len(chain) == 0:
        return None
    return _Beginning(chain.root, request.tokens.view[: chain.tokens_per_block].tobytes())


def _common_blocks(left: LlmRequest, right: LlmRequest) -> int:
    # The tokens of the leading blocks that both have.
    size = left.key_chain.tokens_per_block
    return common_length(left.tokens.view, right.tokens.view) // size * size
