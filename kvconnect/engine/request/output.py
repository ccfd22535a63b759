"""The output of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvconnect.engine.request.logprobs import LogprobView, PromptLogprobs
from kvconnect.engine.request.stops import FinishReason
from kvconnect.engine.request.tokenizer import Tokenizer
from kvconnect.explain.outcome import Explanation, with_texts

__all__ = ["CompletionOutput", "EngineStats", "RequestOutput", "StreamChunk", "as_one"]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """A completion of a prompt.

    Attributes:
        index: its number among them, from 0.
        text: without special tokens and without the stop string; empty without a tokenizer.
        token_ids: the generated tokens; a stop token is part of it.
        finish_reason: a stop token or string, the length, or an abort.
        stop_reason: which of the request's own stop strings or stop tokens ended it; ``None`` for
            the model's end-of-sequence token, too.
        logprobs: of each token; ``None`` if not asked for.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    logprobs: LogprobView | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the log probabilities of its tokens; ``None`` if not asked for."""
        if self.logprobs is None:
            return None
        pairs = zip(self.token_ids, self.logprobs, strict=True)
        return sum(logprobs[token].logprob for token, logprobs in pairs)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request. With several completions, text, tokens and reason are the first one's.

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
        outputs: all its completions, by index. Counts are the sums of theirs, but `prompt_tokens`.
        prompt_logprobs: of each token of the prompt, the first one's is ``None``; ``None`` if not
            asked for.
        lookup_late: the store did not answer within ``lookup_timeout_ms``, so that the prompt was
            computed as if the store had nothing of it.
        explanation: the outcome of each token of its prompt; of the first completion if there are
            several. See `explain`.
        tokenizer: makes the texts of `explain`.
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
    outputs: tuple[CompletionOutput, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
    lookup_late: bool = False
    explanation: Explanation = field(default=Explanation(), repr=False, compare=False)
    tokenizer: Tokenizer | None = field(default=None, repr=False, compare=False)

    def explain(self) -> Explanation:
        """Returns the outcome of each token of its prompt: reused, new, or lost, and why.

        Where the prompt leaves what is cached under its own salt, the texts on both sides of that
        place are included: some 16 tokens before it, and at most a block from there on.
        """
        found = self.explanation.divergence
        if found is None or self.tokenizer is None:
            return self.explanation
        texts = with_texts(found, self.prompt_token_ids, self.tokenizer.decode)
        return replace(self.explanation, divergence=texts)

    @property
    def logprobs(self) -> LogprobView | None:
        """The log probabilities of the first completion; see `CompletionOutput`."""
        return self.outputs[0].logprobs if self.outputs else None

    @property
    def cumulative_logprob(self) -> float | None:
        """The value of the first completion; see `CompletionOutput`."""
        return self.outputs[0].cumulative_logprob if self.outputs else None


def as_one(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Returns the output of a prompt, from those of its completions in order."""
    first = outputs[0]
    if len(outputs) == 1:
        return first
    return replace(
        first,
        computed_tokens=sum(one.computed_tokens for one in outputs),
        reused_device_tokens=sum(one.reused_device_tokens for one in outputs),
        reused_store_tokens=sum(one.reused_store_tokens for one in outputs),
        reused_host_tokens=sum(one.reused_host_tokens for one in outputs),
        lookup_late=any(one.lookup_late for one in outputs),
        preemptions=sum(one.preemptions for one in outputs),
        outputs=tuple(completion for one in outputs for completion in one.outputs),
    )


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """The output since the chunk before it.

    Attributes:
        request_id: of the request.
        token_ids: new tokens.
        text: new text; it lags behind the tokens where characters or stop strings are unfinished.
        finish_reason: set in the last chunk, of each completion if there are several.
        index: number of the completion.
        logprobs: of the new tokens; ``None`` if not asked for.
    """

    request_id: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    index: int = 0
    logprobs: LogprobView | None = None


@dataclass(slots=True)
class EngineStats:
    """The counts since the start, and what the engine holds now.

    Attributes:
        steps: forward passes.
        finished_requests: ended, aborts included.
        prompt_tokens, computed_tokens, reused_device_tokens, reused_store_tokens: of these.
        generated_tokens: of finished requests, too.
        reused_host_tokens: those of `reused_device_tokens` that were onboarded from the host tier.
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
