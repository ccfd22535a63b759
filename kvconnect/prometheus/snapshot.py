"""The counters and gauges of `kvconnect.trace` at one moment, and metrics, read from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Self, TypeAlias

from kvconnect.trace import Gauge, Labels, metrics

__all__ = ["Metric", "Sample", "Snapshot"]

Store: TypeAlias = tuple[str, str]
"""The labels ``store`` and ``place`` of a store."""

_NONE: Store = ("", "")


def _store(labels: Labels) -> Store:
    told = dict(labels)
    return told.get("store", ""), told.get("place", "")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The counters and gauges at one moment, and the engine of their process."""

    engine: str
    counters: Mapping[Labels, Mapping[str, float]]
    gauges: tuple[Gauge, ...]

    @classmethod
    def take(cls) -> Self:
        """Takes a snapshot of this process; may block for half a second for each slow store."""
        return cls(metrics.engine, metrics.by_labels(), tuple(metrics.gauges()))

    def total(self, name: str) -> float:
        """Returns a counter over all labels."""
        return sum(counters.get(name, 0) for counters in self.counters.values())

    def labelled(self, name: str, label: tuple[str, str]) -> float:
        """Returns a counter over all events that have `label`."""
        return sum(
            counters.get(name, 0) for labels, counters in self.counters.items() if label in labels
        )

    def stores(self) -> Iterator[tuple[Store, Mapping[str, float]]]:
        """Yields the counters of each store."""
        for labels, counters in self.counters.items():
            store = _store(labels)
            if store != _NONE:
                yield store, counters

    def gauge(self, name: str) -> dict[Store, float]:
        """Returns a gauge by store; gauges without a store are added up."""
        found: dict[Store, float] = {}
        for gauge in self.gauges:
            if gauge.name == name:
                store = _store(gauge.labels)
                found[store] = found.get(store, 0) + gauge.value
        return found


Sample: TypeAlias = tuple[tuple[str, ...], float]
"""Values of a metric's labels, in its order, and its own."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric: its name, its description, how it is read from a `Snapshot`, and its labels.

    As in Prometheus, counters are those whose name ends in ``_total``.
    """

    name: str
    help: str
    read: Callable[[Snapshot], Iterable[Sample]]
    labels: tuple[str, ...] = ()

    @property
    def kind(self) -> Literal["counter", "gauge"]:
        """The type in Prometheus."""
        return "counter" if self.name.endswith("_total") else "gauge"
