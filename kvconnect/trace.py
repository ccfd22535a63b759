"""Reports events to counters, logs and the user's hooks.

``with trace("store.load", blocks=8) as span: ... span.set(loaded=7)`` counts the event, adds up its
numbers and its time, and calls every hook. ``count("frame.bad")`` is an event without duration.
A size (memory in use, a breaker's state) is a gauge, read on request.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import NamedTuple, Self, TypeAlias

__all__ = [
    "Event",
    "Gauge",
    "Hook",
    "Labels",
    "Metrics",
    "Span",
    "count",
    "metrics",
    "trace",
    "warn_once",
]

logger = logging.getLogger("kvconnect")

TIMES = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""The upper bounds of the buckets of times, in seconds."""

SIZES = tuple(float(4096 << 2 * step) for step in range(10))
"""The upper bounds of the buckets of sizes, in bytes: 4 KiB, 16 KiB, … 1 GiB."""

_CALLS = ("lookup", "load", "save", "delete", "children", "open", "close")

BOUNDS: Mapping[str, Mapping[str, tuple[float, ...]]] = MappingProxyType(
    {
        "server.first_token": {"seconds": TIMES},
        "server.between_tokens": {"seconds": TIMES},
        **{f"store.{call}": {"seconds": TIMES} for call in _CALLS},
        **{f"store.{call}": {"seconds": TIMES, "bytes": SIZES} for call in ("load", "save")},
    }
)
"""The upper bounds of the buckets, by event and by name of the value."""


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


Labels: TypeAlias = tuple[tuple[str, str], ...]
"""The labels of an event or a gauge: ``(("store", "DiskBackend"), ("place", "disk:///kv"))``."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event: its name, time, numbers, the error it ended with, and its labels.

    That of a request which is over also has its `timeline`, while a hook makes traces.
    """

    name: str
    seconds: float = 0.0
    values: dict[str, float] = field(default_factory=dict)
    error: BaseException | None = None
    labels: Labels = ()
    timeline: Timeline | None = None


Hook = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Gauge:
    """A present size, with its labels."""

    name: str
    value: float
    labels: Labels = ()


_NO_BOUNDS: Mapping[str, tuple[float, ...]] = {}


class Metrics:
    """The counters of this process, and the hooks that are called with every event. Thread-safe.

    Counters are named ``event``, ``event.errors``, ``event.seconds`` and ``event.<value>``. Those
    in `BOUNDS` have a histogram of the single numbers beside their sum.

    Attributes:
        engine: the engine of this process, for readers of several: ``kvconnect``, or the engine
            whose adapter was made last.
        num_events: the number of events: as long as it stays the same, no counter changed.
    """

    def __init__(self) -> None:
        self.engine = "kvconnect"
        self.num_events = 0
        self._counters: dict[Labels, Counter[str]] = {(): Counter()}
        self._histograms: dict[Labels, dict[str, list[int]]] = {}
        self._gauges: tuple[tuple[Callable[[], Mapping[str, float]], Labels], ...] = ()
        self._lock = threading.Lock()
        self._hooks: tuple[Hook, ...] = ()
        self._tracers = 0
        self._warned: set[str] = set()

    def snapshot(self) -> dict[str, float]:
        """Returns a copy of all counters, summed over their labels."""
        total: Counter[str] = Counter()
        for counters in self.by_labels().values():
            for name, value in counters.items():
                total[name] += value  # type: ignore[assignment]
        return dict(total)

    def by_labels(self) -> dict[Labels, dict[str, float]]:
        """Returns a copy of all counters, by labels."""
        with self._lock:
            return {labels: dict(counters) for labels, counters in self._counters.items()}

    def histograms(self) -> dict[Labels, dict[str, tuple[int, ...]]]:
        """Returns how many values fell into each bucket, by labels and counter.

        A bucket has the numbers up to its bound; the last one has those above all bounds.
        """
        with self._lock:
            return {
                labels: {name: tuple(buckets) for name, buckets in found.items()}
                for labels, found in self._histograms.items()
            }

    def add_gauges(
        self, read: Callable[[], Mapping[str, float]], labels: Labels = ()
    ) -> Callable[[], None]:
        """Registers `read`, which `gauges` calls for sizes; returns a function that removes it.

        `read` is called on the thread of `gauges`. An error of `read` is logged once and skipped.
        """
        entry = (read, labels)
        with self._lock:
            self._gauges = (*self._gauges, entry)

        def remove() -> None:
            with self._lock:
                self._gauges = tuple(one for one in self._gauges if one is not entry)

        return remove

    def gauges(self) -> list[Gauge]:
        """Returns all present sizes; blocks as long as their readers do."""
        found = []
        for read, labels in self._gauges:
            try:
                found += [Gauge(name, value, labels) for name, value in read().items()]
            except Exception as error:  # noqa: BLE001  one that cannot be read hides no other
                self.warn_once(f"gauges {read!r}", f"gauges of {dict(labels)}: {error!r}")
        return found

    @property
    def traces(self) -> bool:
        """Returns whether requests that are made now are to note their phases."""
        return self._tracers > 0

    def add_hook(self, hook: Hook, *, traces: bool = False) -> Callable[[], None]:
        """Calls `hook` with every event, on the thread of the event; returns how to remove it.

        An error that it raises is logged once and not raised further.

        Args:
            hook: what is called.
            traces: it makes traces; see `traces`.
        """
        with self._lock:
            self._hooks = (*self._hooks, hook)
            self._tracers += traces

        def remove() -> None:
            with self._lock:
                left = tuple(h for h in self._hooks if h is not hook)
                self._tracers -= traces and len(left) < len(self._hooks)
                self._hooks = left

        return remove

    def emit(self, event: Event) -> None:
        """Counts `event` and calls the hooks with it."""
        with self._lock:
            counters = self._counters.get(event.labels)
            if counters is None:
                counters = self._counters[event.labels] = Counter()
            self.num_events += 1
            counters[event.name] += 1
            if event.seconds:
                counters[event.name + ".seconds"] += event.seconds  # type: ignore[assignment]
            if event.error is not None:
                counters[event.name + ".errors"] += 1
            for name, value in event.values.items():
                counters[f"{event.name}.{name}"] += value  # type: ignore[assignment]
            for name, bounds in BOUNDS.get(event.name, _NO_BOUNDS).items():
                if number := event.seconds if name == "seconds" else event.values.get(name, 0):
                    found = self._histograms.setdefault(event.labels, {})
                    buckets = found.setdefault(f"{event.name}.{name}", [0] * (len(bounds) + 1))
                    buckets[bisect_left(bounds, number)] += 1
            hooks = self._hooks
        for hook in hooks:
            try:
                hook(event)
            except Exception as error:  # noqa: BLE001  a user's hook never changes what it watches
                self.warn_once(f"hook {hook!r}", f"hook {hook!r} failed on {event.name}: {error!r}")

    def warn_once(self, topic: str, message: str) -> None:
        """Logs `message` as a warning for the first use of `topic`, at debug level after that."""
        with self._lock:
            first = topic not in self._warned
            if len(self._warned) < 10_000:
                self._warned.add(topic)
        logger.log(logging.WARNING if first else logging.DEBUG, "%s", message)


metrics = Metrics()
"""The metrics of the whole process."""


class Span:
    """A running event; see `trace`."""

    __slots__ = ("_labels", "_name", "_start", "_values")

    def __init__(self, name: str, values: dict[str, float], labels: Labels = ()) -> None:
        self._name = name
        self._values = values
        self._labels = labels

    def set(self, **values: float) -> None:
        """Adds numbers that are known only at the end."""
        self._values.update(values)

    def __enter__(self) -> Self:
        self._start = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        seconds = time.perf_counter() - self._start
        metrics.emit(Event(self._name, seconds, self._values, error, self._labels))


def trace(name: str, labels: Labels = (), **values: float) -> Span:
    """Returns a context manager that reports `name` at its end, with its time and `values`."""
    return Span(name, values, labels)


def count(name: str, labels: Labels = (), **values: float) -> None:
    """Counts an event `name` without duration."""
    metrics.emit(Event(name, 0.0, values, labels=labels))


def warn_once(topic: str, message: str) -> None:
    """Logs `message` as a warning for the first use of `topic` in this process."""
    metrics.warn_once(topic, message)
