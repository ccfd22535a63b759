"""The output of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvconnect.engine.request.logprobs import LogprobView, PromptLogprobs
from kvconnect.engine.request.stops import FinishReason
from kvconnect.engine.request.tokenizer import Tokenizer
from kvconnect.explain.outcome import Explanation, with_texts


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """A completion of a prompt.

    Attributes:
        index: the number of the completion, from 0.
        text: the generated text, without special tokens and stop string; empty without a tokenizer.
        token_ids: the generated tokens, a stop token included.
        finish_reason: a stop token or string, the length, or an abort.
        stop_reason: the request's stop string or stop token that ended the completion; else
            ``None``, also for the model's end-of-sequence token.
        logprobs: the log probabilities of each token; ``None`` if not requested.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    logprobs: LogprobView | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the log probabilities of its tokens; ``None`` if not requested."""
        if self.logprobs is None:
            return None
        pairs = zip(self.token_ids, self.logprobs, strict=True)
        return sum(logprobs[token].logprob for token, logprobs in pairs)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request. With several completions, text, tokens and reason are the first one's.

    Attributes:
        request_id: unique within the engine.
        prompt_token_ids, output_token_ids: the prompt's tokens, and the generated tokens, a stop
            token included.
        output_text: the generated text, without special tokens and stop string; empty without a
            tokenizer.
        finish_reason: a stop token or string, the length, or an abort.
        prompt_tokens: length of the prompt.
        computed_tokens: the number of prompt tokens that were computed; after a preemption tokens
            count again.
        reused_device_tokens, reused_store_tokens: the number of prompt tokens that came from the
            cache, and from a store.
        ttft_ms: time from submission to the first token; ``None`` if there was none.
        kv_transfer_params: the connector's data for the client.
        reused_host_tokens: those of `reused_device_tokens` that the host tier brought back.
        drafted_tokens, accepted_tokens: tokens that speculative decoding proposed, and those
            accepted.
        preemptions: how often the request was preempted.
        outputs: all completions, by index. All counts except `prompt_tokens` are their sums.
        prompt_logprobs: the log probabilities of each token of the prompt, ``None`` for the first
            token; ``None`` if not requested.
        lookup_late: the store did not answer within ``lookup_timeout_ms``, so that the prompt was
            computed as if the store had nothing of it.
        explanation: the outcome of each token of the prompt, for the first completion. See
            `explain`.
        tokenizer: decodes the texts of `explain`.
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
        """Returns the outcome of each token of the prompt: reused, new, or lost for a reason.

        The result includes the texts where the prompt differs from the blocks cached under its own
        salt: some 16 tokens before the difference, and at most a block after it.
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
    """Returns one output for a prompt, made of the outputs of its completions in order."""
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
        request_id: the id of the request.
        token_ids: new tokens.
        text: new text; text of unfinished characters or stop strings comes in a later chunk.
        finish_reason: set in the last chunk of each completion.
        index: number of the completion.
        logprobs: the log probabilities of the new tokens; ``None`` if not requested.
    """

    request_id: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    index: int = 0
    logprobs: LogprobView | None = None


@dataclass(slots=True)
class EngineStats:
    """The counts since the start, and the present numbers of requests and blocks.

    Attributes:
        steps: forward passes.
        finished_requests: requests that ended, aborted ones included.
        prompt_tokens, computed_tokens, reused_device_tokens, reused_store_tokens: sums over the
            finished requests.
        generated_tokens: sum over the finished requests.
        reused_host_tokens: those of `reused_device_tokens` that were onboarded from the host tier.
        preemptions: how often requests were preempted.
        drafted_tokens, accepted_tokens: tokens that speculative decoding proposed, and those
            accepted.
        waiting_requests, running_requests, loading_requests, saving_requests: the present numbers.
        free_blocks, max_blocks: blocks of the KV cache; with several pools, of group 0.
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
