"""Makes prompts with a common beginning wait until one has computed it, and reuse its blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TypeAlias

from kvconnect.cache.resource_manager import BaseKVCacheManager
from kvconnect.keys import BlockKey
from kvconnect.request import LlmRequest, RequestState
from kvconnect.tokens import common_length

_Beginning: TypeAlias = tuple[BlockKey, bytes]
"""The key under which prompts may share blocks: the namespace's root, and the first block."""


class CommonPrefixes:
    """The prompts that one step computes, by their first block.

    A request waits for another one only in two cases. The other computes in this step, and its
    chunk ends where the prompts differ. Or the other's load overlaps with computing, and is at most
    twice as long as the common tokens; no longer than these in a cache with windows, which gets its
    last blocks only. So a request waits only for tokens that are certain to be
    computed. A waiting request holds no blocks.

    Args:
        kv: publishes what a step computed, and predicts what a request could reuse then.
        enabled: if false, no request waits for another, and no chunk ends early.
    """

    def __init__(self, kv: BaseKVCacheManager, *, enabled: bool = True) -> None:
        self._kv = kv
        self._enabled = enabled
        self._computing: defaultdict[_Beginning | None, list[LlmRequest]] = defaultdict(list)
        self._ends: dict[int, int] = {}

    def add(self, requests: Iterable[LlmRequest]) -> None:
        """Adds `requests`, which compute or load tokens of their prompts in this step."""
        if not self._enabled:
            return
        for request in requests:
            if (beginning := _beginning(request)) is not None:
                self._computing[beginning].append(request)

    def discard(self, requests: Iterable[LlmRequest]) -> None:
        """Removes `requests`, which do not compute in this step after all."""
        for request in requests:
            others = self._computing.get(_beginning(request), [])
            if request in others:
                others.remove(request)

    def hold_back(self, request: LlmRequest) -> bool:
        """Returns whether `request` could reuse more tokens after this step, and so should wait.

        The chunk of the request that computes those tokens gets an `end`.
        """
        beginning = _beginning(request)
        others = () if beginning is None else self._computing.get(beginning, ())
        end, first = 0, None
        for other in others:
            common = _common_blocks(request, other)
            least = other.load_end if self._kv.has_windows else other.load_end / 2
            if common > max(end, other.num_computed_tokens) and common >= least:
                end, first = common, other
        if first is None:
            return False
        if self._kv.reusable_tokens(request, end) <= self._kv.reusable_tokens(request):
            return False
        number = first.request_id
        self._ends[number] = min(end, self._ends.get(number, end))
        return True

    def end(self, request: LlmRequest, start: int) -> int:
        """Returns the end of the chunk of `request` from token `start` on.

        The end is that of the tokens that another request waits for, if one does.
        """
        end = self._ends.get(request.request_id, 0)
        return end if end > start else request.num_tokens


def brings_prefix(request: LlmRequest) -> bool:
    """Returns whether `request` computes its prompt now, perhaps beside a load."""
    return request.state is RequestState.CONTEXT or request.load_end > 0


def _beginning(request: LlmRequest) -> _Beginning | None:
    chain = request.key_chain
    if len(chain) == 0:
        return None
    return chain.root, request.tokens.view[: chain.tokens_per_block].tobytes()


def _common_blocks(left: LlmRequest, right: LlmRequest) -> int:
    # The tokens of the leading blocks that both have.
    size = left.key_chain.tokens_per_block
    return common_length(left.tokens.view, right.tokens.view) // size * size
