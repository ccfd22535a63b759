"""A request in the engine, and what has come out of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvconnect.engine.drafts import NO_DRAFTS, accepted_run
from kvconnect.engine.request.output import RequestOutput, StreamChunk
from kvconnect.engine.request.stops import FinishReason, StopChecker, StopStatus
from kvconnect.request import LlmRequest, RequestState

__all__ = ["LiveRequest", "TokenRun"]


@dataclass(frozen=True, slots=True)
class TokenRun:
    """What one step brought a request.

    Attributes:
        live: the request.
        tokens: appended to it; the last one was not fed yet.
        statuses: what each of them brought; only the last may end the request.
        num_rejected: drafts that were fed and not taken.
    """

    live: LiveRequest
    tokens: list[int]
    statuses: list[StopStatus]
    num_rejected: int

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ended with this run, if it did."""
        return self.statuses[-1].finish_reason


class LiveRequest:
    """A request in the engine, what it cost so far, and what has come out of it.

    The engine's thread owns it. Any other may call `done`, `result` and `wait_beyond`, and nothing
    else: what they read is written under a lock.

    Attributes:
        request: what the scheduler, the cache and connectors see of it.
        preemptions: how often it lost its blocks.
    """

    def __init__(self, request: LlmRequest, stops: StopChecker) -> None:
        self.request = request
        self.preemptions = 0
        self._stops = stops
        self._first_token_at: float | None = None
        self._drafted_tokens = 0
        self._accepted_tokens = 0
        self._changed = threading.Condition()
        self._ended = threading.Event()  # apart: who waits for the end is not woken by each token
        self._streams = 0
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._output: RequestOutput | None = None
        self._error: BaseException | None = None

    def take(self, chosen: Sequence[int]) -> TokenRun:
        """Append what a step yielded: the drafts that were right and one more, up to the end.

        Args:
            chosen: the token after the request's last one and after each of its drafts.
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
        # As without drafts: the last token counts as not fed.
        request.num_computed_tokens = request.num_tokens - 1
        request.state = RequestState.GENERATION
        request.draft_tokens = NO_DRAFTS
        self._drafted_tokens += len(drafts)
        self._accepted_tokens += len(tokens) - 1
        return TokenRun(self, tokens, statuses, num_rejected=len(drafts) - (len(tokens) - 1))

    def emit(self, run: TokenRun) -> None:
        """Show `run` to those that wait for it."""
        if self._first_token_at is None:
            self._first_token_at = time.perf_counter()
        with self._changed:
            self._tokens += run.tokens
            self._texts += [status.text for status in run.statuses]
            if self._streams:
                self._changed.notify_all()

    def finish(self, reason: FinishReason) -> None:
        """End it; what waits for it gets its output."""
        with self._changed:
            if reason == "abort":
                self._texts.append(self._stops.abort())
            self._output = self._make_output(reason)
            self._end()

    def fail(self, error: BaseException) -> None:
        """End it by an error; later ones are ignored."""
        with self._changed:
            if not self.done:
                self._error = error
            self._end()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._output is not None or self._error is not None

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end; see `RequestHandle.result`."""
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the request has not finished within {timeout} s")
        if self._error is not None:
            raise self._error
        assert self._output is not None  # noqa: S101  done without an error
        return self._output

    def wait_beyond(self, seen: int) -> StreamChunk:
        """Wait for more than `seen` tokens, or the end; return what came since."""
        with self._changed:
            self._streams += 1
            try:
                self._changed.wait_for(lambda: len(self._tokens) > seen or self.done)
            finally:
                self._streams -= 1
            # All of it under the lock: an end that comes after these tokens may bring others.
            tokens, text = tuple(self._tokens[seen:]), "".join(self._texts[seen:])
            output, error = self._output, self._error
        if error is not None:
            raise error
        reason = None if output is None else output.finish_reason
        return StreamChunk(self.request.request_id, tokens, text, reason)

    def _end(self) -> None:
        self._changed.notify_all()
        self._ended.set()

    def _make_output(self, reason: FinishReason) -> RequestOutput:
        request = self.request
        tokens = request.tokens.view.tolist()
        ttft = None if self._first_token_at is None else self._first_token_at - request.arrived_at
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=tuple(tokens[: request.prompt_len]),
            output_token_ids=tuple(tokens[request.prompt_len :]),
            output_text="".join(self._texts),
            finish_reason=reason,
            prompt_tokens=request.prompt_len,
            computed_tokens=request.computed_tokens,
            reused_device_tokens=request.reused_device_tokens,
            reused_store_tokens=request.reused_store_tokens,
            ttft_ms=None if ttft is None else 1000 * ttft,
            kv_transfer_params=request.kv_transfer_params,
            reused_host_tokens=request.reused_host_tokens,
            drafted_tokens=self._drafted_tokens,
            accepted_tokens=self._accepted_tokens,
            preemptions=self.preemptions,
        )
