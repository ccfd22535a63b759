"""Adds the tokens that a load filled to the computed tokens of its request."""

from __future__ import annotations

from kvconnect.request import LlmRequest, RequestState, ScheduledBatch


def note_loaded(request: LlmRequest, valid: int) -> None:
    """Records that a load of `request` ended with `valid` leading tokens."""
    request.reused_store_tokens += max(0, valid - request.num_computed_tokens)
    request.num_computed_tokens, request.num_external_tokens = valid, 0
    request.forget_load()


def join_head(request: LlmRequest) -> None:
    """Adds the first tokens that a load brought to the computed ones, unless these are in a block.

    Computing has zeroed the rest of that block: its tokens are computed first.
    """
    head = request.load_head
    if head > request.num_computed_tokens >= request.load_floor:
        request.reused_store_tokens += head - request.num_computed_tokens
        request.num_computed_tokens = head


def join_load(request: LlmRequest) -> None:
    """Adds what a load brought to the computed tokens of `request`, if these reach it."""
    if request.load_end:
        join_head(request)
    if request.load_end and request.num_computed_tokens >= request.joins_load_at:
        note_loaded(request, request.load_end)


def joined_loads(batch: ScheduledBatch) -> list[LlmRequest]:
    """Returns the requests of `batch` that compute after their load ended, after `join_load`.

    The caller has published their computed tokens: a snapshot of states may be at the end of these.
    """
    ended = [one for one in batch.context_requests if one.state is RequestState.CONTEXT]
    ended = [one for one in ended if one.load_end]
    for request in ended:
        join_load(request)
    return ended


def note_computed(request: LlmRequest, end: int) -> None:
    """Notes that `request` is computed up to `end`, where its load may write no more."""
    request.num_computed_tokens, request.num_external_tokens = end, 0
    if request.load_end:
        size = request.key_chain.tokens_per_block
        request.load_floor = -(-end // size) * size
