"""One place where things that happen are told: counters, logs and the user's hook alike.

``with trace("store.load", blocks=8) as span: ... span.set(loaded=7)`` counts the event, adds up its
numbers and its time, and calls every hook. ``count("frame.bad")`` is an event without duration.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

__all__ = ["Event", "Hook", "Metrics", "Span", "count", "metrics", "trace", "warn_once"]

logger = logging.getLogger("kvconnect")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened: its name, time, numbers, and the error it ended with."""

    name: str
    seconds: float = 0.0
    values: dict[str, float] = field(default_factory=dict)
    error: BaseException | None = None


Hook = Callable[[Event], None]


class Metrics:
    """Counters of this process, and the hooks that hear of every event. Thread-safe.

    Counters are named ``event``, ``event.errors``, ``event.seconds`` and ``event.<value>``.
    """

    def __init__(self) -> None:
        self._counters: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._hooks: tuple[Hook, ...] = ()
        self._warned: set[str] = set()

    def snapshot(self) -> dict[str, float]:
        """All counters, as a copy."""
        with self._lock:
            return dict(self._counters)

    def add_hook(self, hook: Hook) -> Callable[[], None]:
        """Call `hook` with every event, on the thread it happens on; returns how to remove it.

        An error that it raises is logged once and goes no further.
        """
        with self._lock:
            self._hooks = (*self._hooks, hook)

        def remove() -> None:
            with self._lock:
                self._hooks = tuple(h for h in self._hooks if h is not hook)

        return remove

    def emit(self, event: Event) -> None:
        """Count `event` and pass it on."""
        with self._lock:
            counters = self._counters
            counters[event.name] += 1
            if event.seconds:
                counters[event.name + ".seconds"] += event.seconds  # type: ignore[assignment]
            if event.error is not None:
                counters[event.name + ".errors"] += 1
            for name, value in event.values.items():
                counters[f"{event.name}.{name}"] += value  # type: ignore[assignment]
            hooks = self._hooks
        for hook in hooks:
            try:
                hook(event)
            except Exception as error:  # noqa: BLE001  a user's hook never changes what it watches
                self.warn_once(f"hook {hook!r}", f"hook {hook!r} failed on {event.name}: {error!r}")

    def warn_once(self, topic: str, message: str) -> None:
        """Log `message` as a warning the first time `topic` comes up; later ones only at debug."""
        with self._lock:
            first = topic not in self._warned
            if len(self._warned) < 10_000:
                self._warned.add(topic)
        logger.log(logging.WARNING if first else logging.DEBUG, "%s", message)


metrics = Metrics()
"""Of the whole process."""


class Span:
    """A running event; see `trace`."""

    __slots__ = ("_name", "_start", "_values")

    def __init__(self, name: str, values: dict[str, float]) -> None:
        self._name = name
        self._values = values

    def set(self, **values: float) -> None:
        """Add numbers that are known only at the end."""
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
        metrics.emit(Event(self._name, seconds, self._values, error))


def trace(name: str, **values: float) -> Span:
    """A context manager that tells of `name` when it ends, with its time and `values`."""
    return Span(name, values)


def count(name: str, **values: float) -> None:
    """Tell of `name`, which took no time."""
    metrics.emit(Event(name, 0.0, values))


def warn_once(topic: str, message: str) -> None:
    """Log `message` the first time `topic` comes up in this process."""
    metrics.warn_once(topic, message)
