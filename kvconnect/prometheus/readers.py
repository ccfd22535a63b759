"""The ways in which a metric's samples are read from a snapshot of the counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import TypeAlias

from kvconnect.explain.outcome import Outcome
from kvconnect.prometheus.snapshot import Sample, Snapshot

Names: TypeAlias = Mapping[tuple[str, ...], str]
"""The name in `kvconnect.trace` of each part of a metric, by the values of its labels."""


def each(pattern: str, *values: Sequence[object]) -> Names:
    """Returns the names that `pattern` makes of the values of each label, in every combination."""
    return {tuple(map(str, one)): pattern.format(*one) for one in product(*values)}


def totals(names: Names) -> Callable[[Snapshot], Iterable[Sample]]:
    """Reads counters by their names: one sample for each."""
    return lambda now: [(values, now.total(name)) for values, name in names.items()]


def by_label(
    name: str, label: str, values: Sequence[str]
) -> Callable[[Snapshot], Iterable[Sample]]:
    """Reads a counter whose events have a `label`: one sample for each of its `values`."""
    return lambda now: [((value,), now.labelled(name, (label, value))) for value in values]


def sizes(names: Names) -> Callable[[Snapshot], Iterable[Sample]]:
    """Reads gauges by their names: a sample of each value that is set."""
    return lambda now: [
        (values, size) for values, name in names.items() for size in now.gauge(name).values()
    ]


def of_stores(names: Names) -> Callable[[Snapshot], Iterable[Sample]]:
    """Reads counters of each store: its labels, then those of the name."""
    return lambda now: [
        ((*store, *values), counters.get(name, 0))
        for store, counters in now.stores()
        for values, name in names.items()
    ]


def of_calls(names: Names) -> Callable[[Snapshot], Iterable[Sample]]:
    """Reads like `of_stores`, by operation, but only operations that were called."""
    return lambda now: [
        ((*store, *values), counters.get(name, 0))
        for store, counters in now.stores()
        for values, name in names.items()
        if "store." + values[0] in counters
    ]


def store_sizes(name: str) -> Callable[[Snapshot], Iterable[Sample]]:
    """Reads a gauge of each store."""
    return lambda now: now.gauge(name).items()


def outcomes(now: Snapshot) -> Iterator[Sample]:
    """Yields the tokens of each outcome, and the number of those without one."""
    explained = 0.0
    for outcome in Outcome:
        explained += (tokens := now.total(f"engine.request.{outcome}_tokens"))
        yield (str(outcome),), tokens
    yield ("unexplained",), now.total("engine.request.prompt_tokens") - explained


def calls_in_flight(now: Snapshot) -> Iterator[Sample]:
    """Yields the calls of each store that run: in time, and past their deadline."""
    abandoned = now.gauge("store.abandoned")
    for store, running in now.gauge("store.running").items():
        yield (*store, "in_time"), running - abandoned.get(store, 0)
        yield (*store, "abandoned"), abandoned.get(store, 0)


def distribution(name: str) -> Callable[[Snapshot], Iterable[Sample]]:
    """Reads a histogram by model."""
    return lambda now: [
        ((labels.get("model", ""),), found) for labels, found in now.distributions(name)
    ]


def of_each_call(number: str, operations: Sequence[str]) -> Callable[[Snapshot], Iterable[Sample]]:
    """Reads the histogram of a number of a store's calls, by operation."""
    return lambda now: [
        ((labels.get("store", ""), labels.get("place", ""), operation), found)
        for operation in operations
        for labels, found in now.distributions(f"store.{operation}.{number}")
    ]
