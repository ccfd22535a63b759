"""A request in the engine, and its output so far."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from kvconnect.engine.request.logprobs import (
    LogprobTable,
    LogprobView,
    PromptLogprobs,
    TopTokens,
)
from kvconnect.engine.request.output import CompletionOutput, RequestOutput, StreamChunk
from kvconnect.engine.request.owner import Owner
from kvconnect.engine.request.stops import FinishReason, StopChecker, StopStatus
from kvconnect.engine.request.tokenizer import Tokenizer
from kvconnect.engine.sampling.drafts import NO_DRAFTS, accepted_run
from kvconnect.errors import UsageError
from kvconnect.request import LlmRequest, RequestState


@dataclass(frozen=True, slots=True)
class TokenRun:
    """The result of one step for a request.

    Attributes:
        live: the request.
        tokens: the tokens appended to the request; the last one is not computed yet.
        statuses: the status of each of them; only the last may end the request.
        num_rejected: drafts that were computed and rejected.
        top: the log probabilities of each token; ``None`` if not requested.
    """

    live: LiveRequest
    tokens: list[int]
    statuses: list[StopStatus]
    num_rejected: int
    top: TopTokens | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason why the request ended with this run, if it did."""
        return self.statuses[-1].finish_reason


class LiveRequest:
    """A request in the engine, its cost so far, and its output so far.

    The engine's thread owns it. Other threads may call only `done`, `result`, `chunk_beyond`,
    `add_listener` and `remove_listener`, and, once there is a token, `prompt_logprobs`: a lock
    guards what these read.

    Args:
        request: the request of scheduler, cache and connectors.
        stops: makes its text, and decides when it ends.
        index: its number among the completions of its prompt.
        tokenizer: decodes the texts of log probabilities; ``None``: they have no texts.

    Attributes:
        request: the view of scheduler, cache and connectors.
        index: its number among the completions of its prompt.
        preemptions: how often it was preempted.
    """

    def __init__(
        self,
        request: LlmRequest,
        stops: StopChecker,
        *,
        index: int = 0,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.request = request
        self.index = index
        self.preemptions = 0
        self._stops = stops
        self._owner = Owner()
        self._stop_reason: int | str | None = None
        self._first_token_at: float | None = None
        self._drafted_tokens = 0
        self._accepted_tokens = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._tokenizer = tokenizer
        self._logprobs = LogprobTable(tokenizer)
        self._prompt_logprobs = LogprobTable(tokenizer)
        self._listeners: list[Callable[[], None]] = []
        self._output: RequestOutput | None = None
        self._error: BaseException | None = None

    def take_prompt(self, first: int, top: TopTokens) -> None:
        """Adds the log probabilities `top` of the prompt's tokens from number `first` on.

        Values from before a preemption are kept.

        Raises:
            UsageError: tokens before `first` were not computed but reused.
        """
        known = 1 + len(self._prompt_logprobs)
        if first > known:
            raise UsageError(
                f"prompt_logprobs: tokens {known} to {first} of the prompt came from the cache; a "
                "cache manager must heed LlmRequest.may_reuse"
            )
        self._prompt_logprobs.append(top[max(0, known - first) :])

    def take(self, chosen: Sequence[int], top: TopTokens | None = None) -> TokenRun:
        """Appends the tokens of a step: the accepted drafts and one more, up to the end.

        Args:
            chosen: the token after the request's last one and after each of its drafts.
            top: the likeliest tokens beside each of `chosen`; ``None`` if not requested.
        """
        request, drafts = self.request, self.request.draft_tokens
        tokens: list[int] = []
        statuses: list[StopStatus] = []
        for token in accepted_run(drafts, chosen):
            tokens.append(token)
            statuses.append(self._stops.add(token))
            if statuses[-1].finish_reason is not None:
                break
        request.append_tokens(np.array(tokens, np.int32))
        # The last token counts as not computed, like without drafts.
        request.num_computed_tokens = request.num_tokens - 1
        request.state = RequestState.GENERATION
        request.draft_tokens = NO_DRAFTS
        self._drafted_tokens += len(drafts)
        self._accepted_tokens += len(tokens) - 1
        self._stop_reason = statuses[-1].stop_reason
        return TokenRun(
            self,
            tokens,
            statuses,
            num_rejected=len(drafts) - (len(tokens) - 1),
            top=None if top is None else top[: len(tokens)],
        )

    def emit(self, run: TokenRun) -> None:
        """Adds `run` to the output and notifies waiters."""
        if self._first_token_at is None:
            self._first_token_at = time.perf_counter()
        with self._lock:
            self._tokens += run.tokens
            self._texts += [status.text for status in run.statuses]
            if run.top is not None:
                self._logprobs.append(run.top)
        self._tell()

    def finish(self, reason: FinishReason) -> None:
        """Ends the request for `reason`; waiters get the output."""
        with self._lock:
            if reason == "abort":
                self._texts.append(self._stops.abort())
            self._output = self._make_output(reason)
            self._ended.set()
        self._tell()

    def fail(self, error: BaseException) -> None:
        """Ends the request by `error`; later errors are ignored."""
        with self._lock:
            if not self.done:
                self._error = error
            self._ended.set()
        self._tell()

    @property
    def done(self) -> bool:
        """Returns whether the request has ended, with or without an error."""
        return self._output is not None or self._error is not None

    @property
    def aborted(self) -> bool:
        """Returns whether the request was aborted."""
        return self._output is not None and self._output.finish_reason == "abort"

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Waits for the end; see `RequestHandle.result`."""
        if not self.done:
            self._owner.check()
            if not self._ended.wait(timeout):
                raise TimeoutError(f"the request has not finished within {timeout} s")
        if self._error is not None:
            raise self._error
        assert self._output is not None  # noqa: S101  done without an error
        return self._output

    def chunk_beyond(self, seen: int) -> StreamChunk | None:
        """Returns the output beyond `seen` tokens, or the end; ``None`` if there is neither."""
        with self._lock:
            return self._chunk(seen) if len(self._tokens) > seen or self.done else None

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Registers `listener`, which is called for new tokens, and at the end.

        The listener runs on the engine's thread: it must neither block nor raise. Output that is
        older than the listener is not reported: check for it after the call.

        Raises:
            EngineClosed: it has not ended, and this process was forked from the engine's.
        """
        if not self.done:
            self._owner.check()
        self._listeners.append(listener)

    def remove_listener(self, listener: Callable[[], None]) -> None:
        """Removes `listener`; a running call continues."""
        with suppress(ValueError):  # no lock: its holder may not exist in a forked process
            self._listeners.remove(listener)

    def _tell(self) -> None:
        for listener in tuple(self._listeners):
            listener()

    def _chunk(self, seen: int) -> StreamChunk:
        if self._error is not None:
            raise self._error
        return StreamChunk(
            self.request.request_id,
            tuple(self._tokens[seen:]),
            "".join(self._texts[seen:]),
            None if self._output is None else self._output.finish_reason,
            index=self.index,
            logprobs=self._logprobs_from(seen),
        )

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """The log probabilities of the prompt's tokens; ``None`` if not requested.

        They are complete once the request has an output token.
        """
        if self.request.sampling_params.prompt_logprobs is None:
            return None
        return PromptLogprobs(self._prompt_logprobs.view())

    def _logprobs_from(self, first: int) -> LogprobView | None:
        if self.request.sampling_params.logprobs is None:
            return None
        return self._logprobs.view(first)

    def _make_output(self, reason: FinishReason) -> RequestOutput:
        request = self.request
        tokens = request.tokens.view.tolist()
        ttft = None if self._first_token_at is None else self._first_token_at - request.arrived_at
        completion = CompletionOutput(
            index=self.index,
            text="".join(self._texts),
            token_ids=tuple(tokens[request.prompt_len :]),
            finish_reason=reason,
            stop_reason=self._stop_reason,
            logprobs=self._logprobs_from(0),
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=tuple(tokens[: request.prompt_len]),
            output_token_ids=completion.token_ids,
            output_text=completion.text,
            finish_reason=reason,
            prompt_tokens=request.prompt_len,
            computed_tokens=request.computed_tokens,
            reused_device_tokens=request.reused_device_tokens,
            reused_store_tokens=request.reused_store_tokens,
            ttft_ms=None if ttft is None else 1000 * ttft,
            kv_transfer_params=request.kv_transfer_params,
            reused_host_tokens=request.reused_host_tokens,
            lookup_late=request.lookup_late,
            explanation=request.account.explanation(),
            tokenizer=self._tokenizer,
            drafted_tokens=self._drafted_tokens,
            accepted_tokens=self._accepted_tokens,
            preemptions=self.preemptions,
            outputs=(completion,),
            prompt_logprobs=self.prompt_logprobs,
        )
