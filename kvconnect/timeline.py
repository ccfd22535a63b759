"""The phases of a request, as a trace of it shows them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["TRACE_HEADERS", "Phase", "Timeline", "trace_headers"]

TRACE_HEADERS = ("traceparent", "tracestate")
"""The headers of W3C's Trace Context: which trace a request belongs to."""

_MOST_PHASES = 64


def trace_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Returns those of `headers` that name a trace, by their names in lower case."""
    return {name: headers[name] for name in TRACE_HEADERS if name in headers}


class Phase(NamedTuple):
    """A phase of a request, in nanoseconds since the epoch."""

    name: str
    start_ns: int
    end_ns: int


class Timeline:
    """The phases of one request, from its arrival to when its blocks are released.

    Attributes:
        headers: `TRACE_HEADERS` of the caller; may be empty.
        started_ns: when the request was made; nanoseconds since the epoch, as all times here.
        ended_ns: when its answer was complete; 0: it is not yet.
        phases: in order, the running one left out. A request that is preempted again and again has
            the first 64 only.
        reason: why it ended: ``length``, ``stop``, ``abort``, or ``error``.
    """

    __slots__ = ("_phase", "_since_ns", "ended_ns", "headers", "phases", "reason", "started_ns")

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.headers = headers
        self.started_ns = self._since_ns = time.time_ns()
        self.ended_ns = 0
        self.phases: list[Phase] = []
        self.reason = ""
        self._phase: str | None = None

    def enter(self, phase: str | None) -> None:
        """Ends the running phase, and begins `phase`; ``None``: none follows."""
        if phase == self._phase:
            return
        now = time.time_ns()
        if self._phase is not None and len(self.phases) < _MOST_PHASES:
            self.phases.append(Phase(self._phase, self._since_ns, now))
        self._phase, self._since_ns = phase, now

    def end(self, reason: str) -> None:
        """Notes that the answer is complete; later calls have no effect."""
        if not self.ended_ns:
            self.ended_ns, self.reason = time.time_ns(), reason
