"""Counts the times that clients wait for tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvconnect.engine.request.handle import RequestHandle
from kvconnect.engine.request.output import RequestOutput
from kvconnect.trace import Event, metrics

__all__ = ["TokenTimes"]


class TokenTimes:
    """The times of one request: to its first token, and between its tokens.

    A request that fails, or whose client disconnects, is not counted.

    Args:
        model: the name of the model, a label.
        completions: the completions of each prompt.
    """

    def __init__(self, model: str, completions: int) -> None:
        self._labels = (("model", model),)
        self._completions = completions
        self._last_at: dict[int, float] = {}

    def arrived(self, index: int) -> None:
        """Records the arrival of tokens of choice `index`, counted over all prompts."""
        self._last_at[index] = time.perf_counter()

    async def timed(self, handle: RequestHandle) -> RequestOutput:
        """Returns the output of `handle` once it has ended, and counts its times."""
        output = await handle
        self._count(output, handle.submitted_at, [time.perf_counter()] * len(output.outputs))
        return output

    async def count_streamed(self, handles: Sequence[RequestHandle]) -> None:
        """Counts the times of `handles`, all of which have ended."""
        for number, handle in enumerate(handles):
            first = number * self._completions
            output = await handle
            ends = [self._last_at.get(first + one.index, 0.0) for one in output.outputs]
            self._count(output, handle.submitted_at, ends)

    def _count(self, output: RequestOutput, submitted_at: float, ended_at: Sequence[float]) -> None:
        if output.ttft_ms is None or output.finish_reason == "abort":
            return
        first_s = output.ttft_ms / 1000
        metrics.emit(Event("server.first_token", first_s, labels=self._labels))
        for completion, end in zip(output.outputs, ended_at, strict=True):
            later = len(completion.token_ids) - 1
            between_s = end - submitted_at - first_s
            if later > 0 and between_s > 0:
                metrics.emit(Event("server.between_tokens", between_s / later, labels=self._labels))
