"""A request in the engine, and who waits for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvconnect.engine.drafts import NO_DRAFTS, accepted_run
from kvconnect.engine.request.handle import RequestProgress
from kvconnect.engine.request.output import RequestOutput
from kvconnect.engine.request.stops import FinishReason, StopChecker, StopStatus
from kvconnect.request import LlmRequest, RequestState

__all__ = ["LiveRequest", "TokenRun"]


@dataclass(frozen=True, slots=True)
class TokenRun:
    """What one step brought a request.

    Attributes:
        tokens: appended to it; the last one was not fed yet.
        statuses: what each of them brought; only the last may end the request.
        num_rejected: drafts that were fed and not taken.
    """

    tokens: list[int]
    statuses: list[StopStatus]
    num_rejected: int

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ended with this run, if it did."""
        return self.statuses[-1].finish_reason


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request in the engine, what it cost so far, and who waits for it."""

    request: LlmRequest
    progress: RequestProgress
    stops: StopChecker
    texts: list[str] = field(default_factory=list)
    first_token_at: float | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0

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
            statuses.append(self.stops.add(token))
            if statuses[-1].finish_reason is not None:
                break
        request.append_tokens(np.array(tokens, np.int32))
        # As without drafts: the last token counts as not fed.
        request.num_computed_tokens = request.num_tokens - 1
        request.state = RequestState.GENERATION
        request.draft_tokens = NO_DRAFTS
        self.drafted_tokens += len(drafts)
        self.accepted_tokens += len(tokens) - 1
        return TokenRun(tokens, statuses, num_rejected=len(drafts) - (len(tokens) - 1))

    def emit(self, run: TokenRun) -> None:
        """Hand `run` to whoever waits for it."""
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        for token, status in zip(run.tokens, run.statuses, strict=True):
            self.texts.append(status.text)
            self.progress.add(token, status.text)

    def output(self, reason: FinishReason) -> RequestOutput:
        """What the request gives back."""
        request = self.request
        tokens = request.tokens.view.tolist()
        ttft = None if self.first_token_at is None else self.first_token_at - request.arrived_at
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=tuple(tokens[: request.prompt_len]),
            output_token_ids=tuple(tokens[request.prompt_len :]),
            output_text="".join(self.texts),
            finish_reason=reason,
            prompt_tokens=request.prompt_len,
            computed_tokens=request.computed_tokens,
            reused_device_tokens=request.reused_device_tokens,
            reused_store_tokens=request.reused_store_tokens,
            ttft_ms=None if ttft is None else 1000 * ttft,
            kv_transfer_params=request.kv_transfer_params,
            reused_host_tokens=request.reused_host_tokens,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            preemptions=self.preemptions,
        )
