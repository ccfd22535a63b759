"""Compares the free blocks with what admitted requests need to finish."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvconnect.cache.resource_manager import BaseKVCacheManager
from kvconnect.request import LlmRequest, RequestState


def have_room(
    kv: BaseKVCacheManager, requests: Iterable[LlmRequest], more: Sequence[int] = ()
) -> bool:
    """Returns whether the free blocks, less `more`, suffice for all of `requests` to finish.

    `more` is a number for each pool group; empty for none.
    """
    needs = zip(*map(kv.needed_blocks, requests), *([more] if more else []), strict=True)
    return kv.ensure_free([sum(blocks) for blocks in needs])


def reserve_beside(
    kv: BaseKVCacheManager,
    request: LlmRequest,
    num_tokens: int,
    admitted: Iterable[LlmRequest],
    *,
    guaranteed: bool,
) -> bool:
    """Allocates the blocks that `request` computes up to `num_tokens` beside its load.

    Returns False, and changes nothing, if there are not enough. `admitted` are all requests that
    hold blocks. While the load runs, and if the policy is `guaranteed`, the request gets blocks
    beyond those of its admission only if all of them can finish then.
    """
    more = kv.needed_beside(request)
    is_checked = guaranteed or request.state is RequestState.LOADING
    if is_checked and any(more) and not have_room(kv, admitted, more):
        return False
    return kv.reserve_beside(request, num_tokens)
