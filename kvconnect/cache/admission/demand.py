"""The number of blocks that a request will need, exactly."""

from __future__ import annotations

from functools import lru_cache

from kvconnect.cache.pool.matching import first_in_window
from kvconnect.layout import KvCacheLayout
from kvconnect.request import LlmRequest, RequestState


def peak_of(request: LlmRequest, layout: KvCacheLayout, chunk: int | None) -> int:
    """Returns the most blocks of the pool of `layout` that `request` holds from now on.

    `chunk` is as for `peak_to_completion`.
    """
    if layout.kind != "state":
        return peak_to_completion(request, layout.window, layout.tokens_per_block, chunk)
    total = request.prompt_len + request.sampling_params.max_tokens - 1
    return min(1, total // layout.tokens_per_block)


def peak_of_new(layout: KvCacheLayout, prompt_len: int, max_tokens: int, chunk: int | None) -> int:
    """Returns `peak_of` of a request that has not begun, of `prompt_len` tokens."""
    size, total = layout.tokens_per_block, prompt_len + max_tokens - 1
    if layout.kind == "state":
        return min(1, total // size)
    prefill = peak_of_prefill(layout.window, size, prompt_len, chunk)
    return max(prefill, peak_of_decode(layout.window, size, prompt_len, total))


def fits_beside(
    request: LlmRequest, layout: KvCacheLayout, positions: tuple[int, int], chunk: int | None
) -> bool:
    """Returns whether `request` can compute in the pool of `layout` beside a load.

    Its admission may take no more blocks than the request needs without a load. In a window pool it
    takes those that both `positions` need: where computing begins, and the load's end. The states
    where computing begins are copied in the same step, and their block is released.
    """
    window, size = layout.window, layout.tokens_per_block
    if window is None or layout.kind == "state":
        return True
    held = sum(-(-at // size) - first_in_window(window, at) // size for at in positions)
    return held <= peak_of(request, layout, chunk)


def peak_to_completion(
    request: LlmRequest, window: int | None, tokens_per_block: int, chunk: int | None
) -> int:
    """Returns the most blocks of one pool that `request` holds at any time from now on.

    Args:
        request: the request in its present state. Its last generated token needs no slot.
        window: the attention window of the pool in tokens; ``None`` for full attention.
        tokens_per_block: T.
        chunk: the most tokens of the prompt that a step computes; see `peak_of_prefill`.
    """
    total = request.prompt_len + request.sampling_params.max_tokens - 1
    begin = request.num_tokens
    peak = 0
    if request.state is not RequestState.GENERATION:
        peak = peak_of_prefill(window, tokens_per_block, begin, chunk)
    else:
        begin = request.num_computed_tokens
    peak = max(peak, peak_of_decode(window, tokens_per_block, begin, total))
    if len(request.draft_tokens):
        first = first_in_window(window, request.num_computed_tokens)
        verified = request.num_tokens + len(request.draft_tokens)
        peak = max(peak, -(-verified // tokens_per_block) - first // tokens_per_block)
    return peak


@lru_cache(maxsize=4096)
def peak_of_prefill(
    window: int | None, tokens_per_block: int, num_tokens: int, chunk: int | None
) -> int:
    """Returns the most blocks of one pool that are held at any time while a prompt is computed.

    Args:
        window: the attention window of the pool in tokens; ``None`` for full attention.
        tokens_per_block: T.
        num_tokens: the length of the prompt.
        chunk: the most tokens that a step computes. The result covers every way to cut the prompt
            into such chunks. ``None`` means that one step computes all.
    """
    if window is None or chunk is None or chunk >= num_tokens:
        return -(-num_tokens // tokens_per_block)
    last = num_tokens - chunk  # later chunks hold no more: they end at the same token
    return _peak(window, tokens_per_block, 0, last, chunk)


@lru_cache(maxsize=4096)
def peak_of_decode(
    window: int | None, tokens_per_block: int, num_computed: int, num_tokens: int
) -> int:
    """Returns the most blocks of one pool that are held while tokens are generated one by one.

    Args:
        window: the attention window of the pool in tokens; ``None`` for full attention.
        tokens_per_block: T.
        num_computed: the tokens whose KV is valid at the beginning.
        num_tokens: the tokens whose KV is valid at the end.
    """
    if num_tokens <= num_computed:
        return 0
    if window is None:
        return -(-num_tokens // tokens_per_block)
    return _peak(window, tokens_per_block, num_computed, num_tokens - 1, 1)


def _peak(window: int, size: int, first: int, last: int, step: int) -> int:
    # The maximum over the positions first..last. At each, the blocks overlap the tokens that the
    # position reads and the `step` tokens from the position on. The number of blocks grows until
    # the window is full, and then repeats with the period of a block.
    full = min(last, max(first, window - 1))
    return max(
        -(-(position + step) // size) - first_in_window(window, position) // size
        for position in range(full, min(last, full + size) + 1)
    )
