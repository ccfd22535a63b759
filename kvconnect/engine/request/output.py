"""What a request gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvconnect.engine.request.stops import FinishReason

__all__ = ["EngineStats", "RequestOutput", "StreamChunk"]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request.

    Attributes:
        request_id: unique within the engine.
        prompt_token_ids, output_token_ids: what went in and came out; a stop token is part of it.
        output_text: without special tokens and without the stop string; empty without a tokenizer.
        finish_reason: a stop token or string, the length, or an abort.
        prompt_tokens: length of the prompt.
        computed_tokens: how many of them were computed; more than once after a preemption.
        reused_device_tokens, reused_store_tokens: how many came from the cache, and from a store.
        ttft_ms: time from submission to the first token; ``None`` if there was none.
        kv_transfer_params: data that a connector sends along with the result.
        reused_host_tokens: those of `reused_device_tokens` that the host tier brought back.
        drafted_tokens, accepted_tokens: proposed by speculative decoding, and found right.
        preemptions: how often it lost its blocks to others and came back.
    """

    request_id: int
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    output_text: str
    finish_reason: FinishReason
    prompt_tokens: int
    computed_tokens: int
    reused_device_tokens: int
    reused_store_tokens: int
    ttft_ms: float | None
    kv_transfer_params: Mapping[str, Any] | None = None
    reused_host_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """What came since the chunk before it.

    Attributes:
        request_id: whose.
        token_ids: new tokens.
        text: new text; it lags behind the tokens where characters or stop strings are unfinished.
        finish_reason: set in the last chunk.
    """

    request_id: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None


@dataclass(slots=True)
class EngineStats:
    """Counts since the start, and what the engine holds now.

    Attributes:
        steps: forward passes.
        finished_requests: ended, aborts included.
        prompt_tokens, computed_tokens, reused_device_tokens, reused_store_tokens: of these.
        generated_tokens: of finished requests, too.
        reused_host_tokens: those of `reused_device_tokens` that the host tier brought back.
        preemptions: requests sent back to the queue.
        drafted_tokens, accepted_tokens: proposed by speculative decoding, and found right.
        waiting_requests, running_requests, loading_requests, saving_requests: now.
        free_blocks, max_blocks: of the KV cache; with several pools, of group 0.
    """

    steps: int = 0
    finished_requests: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    reused_device_tokens: int = 0
    reused_store_tokens: int = 0
    generated_tokens: int = 0
    reused_host_tokens: int = 0
    preemptions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    waiting_requests: int = 0
    running_requests: int = 0
    loading_requests: int = 0
    saving_requests: int = 0
    free_blocks: int = 0
    max_blocks: int = 0
