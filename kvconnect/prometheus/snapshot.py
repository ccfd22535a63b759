"""The counters and gauges of `kvconnect.trace` at one moment, and metrics, read from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self, TypeAlias

from kvconnect.trace import Gauge, Labels, metrics

Store: TypeAlias = tuple[str, str]
"""The labels ``store`` and ``place`` of a store."""

_NONE: Store = ("", "")


def _store(labels: Labels) -> Store:
    told = dict(labels)
    return told.get("store", ""), told.get("place", "")


class Distribution(NamedTuple):
    """A histogram: the count of each bucket, the last one above all bounds, and the sum."""

    buckets: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The counters, histograms and gauges at one moment, and the engine of their process."""

    engine: str
    counters: Mapping[Labels, Mapping[str, float]]
    histograms: Mapping[Labels, Mapping[str, tuple[int, ...]]]
    gauges: tuple[Gauge, ...]

    @classmethod
    def take(cls) -> Self:
        """Takes a snapshot of this process; may block for half a second for each slow store."""
        # Histograms first: counters that are read later have at least the numbers of them.
        counted = metrics.histograms()
        return cls(metrics.engine, metrics.by_labels(), counted, tuple(metrics.gauges()))

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

    def distributions(self, name: str) -> Iterator[tuple[dict[str, str], Distribution]]:
        """Yields the histogram of a counter for each set of labels that has one."""
        for labels, found in self.histograms.items():
            if name in found:
                yield dict(labels), Distribution(found[name], self.counters[labels][name])

    def gauge(self, name: str) -> dict[Store, float]:
        """Returns a gauge by store; gauges without a store are added up."""
        found: dict[Store, float] = {}
        for gauge in self.gauges:
            if gauge.name == name:
                store = _store(gauge.labels)
                found[store] = found.get(store, 0) + gauge.value
        return found


Sample: TypeAlias = tuple[tuple[str, ...], float | Distribution]
"""Values of a metric's labels, in its order, and its own."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric: its name, its description, how it is read from a `Snapshot`, and its labels.

    Counters are those whose name ends in ``_total``, the convention of Prometheus. A metric with
    `bounds` is a histogram; they are the upper bounds of its buckets.
    """

    name: str
    help: str
    read: Callable[[Snapshot], Iterable[Sample]]
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()

    @property
    def kind(self) -> Literal["counter", "gauge", "histogram"]:
        """The type in Prometheus."""
        if self.bounds:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"
