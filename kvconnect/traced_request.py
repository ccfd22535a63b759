"""A request whose phases are noted, for traces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvconnect.request import LlmRequest, RequestState
from kvconnect.trace import Event, Timeline, metrics

_PHASES = {
    RequestState.QUEUED: "queue",
    RequestState.LOADING: "load",
    RequestState.CONTEXT: "prefill",
    RequestState.GENERATION: "decode",
    RequestState.SAVING: "save",
}


class TracedRequest(LlmRequest):
    """A request that reports its phases as the event ``engine.request.traced``, once it is over.

    It is over when its blocks are released, which may be a while after its answer. Requests are of
    this class only while traces are made, so that others pay nothing.

    Args:
        args, named: as of `LlmRequest`.
        headers: `TRACE_HEADERS` of the caller.

    Attributes:
        timeline: its phases.
    """

    def __init__(self, *args: Any, headers: Mapping[str, str], **named: Any) -> None:
        self.timeline = Timeline(headers)  # first: the next line sets the state
        super().__init__(*args, **named)

    @property
    def state(self) -> RequestState:
        """The state of the request; each change begins a phase."""
        return self._state

    @state.setter
    def state(self, state: RequestState) -> None:
        self._state = state
        self.timeline.enter(_PHASES.get(state))
        if state is RequestState.FINISHED:
            self._report()

    def note_end(self, reason: str) -> None:
        """Notes that the answer is complete, and why it ended."""
        self.timeline.end(reason)

    def _report(self) -> None:
        timeline = self.timeline
        timeline.end("abort")  # unless it is known better
        values: dict[str, float] = {
            "prompt_tokens": self.prompt_len,
            "output_tokens": self.num_generated_tokens,
            "computed_tokens": self.computed_tokens,
            "reused_device_tokens": self.reused_device_tokens,
            "reused_host_tokens": self.reused_host_tokens,
            "reused_store_tokens": self.reused_store_tokens,
        }
        seconds = (timeline.ended_ns - timeline.started_ns) / 1e9
        metrics.emit(Event("engine.request.traced", seconds, values, timeline=timeline))
