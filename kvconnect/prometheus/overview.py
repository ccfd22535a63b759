"""The numbers that the page and ``kvconnect top`` show, read from the metrics."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TypeAlias

from kvconnect.explain.outcome import LOST
from kvconnect.prometheus.snapshot import Distribution, Snapshot
from kvconnect.prometheus.table import METRICS

Samples: TypeAlias = Mapping[str, Iterable[tuple[Mapping[str, str], float]]]
"""The samples of each metric by its name: their labels, without ``engine``, and values."""


@dataclass(slots=True)
class StoreNumbers:
    """The numbers of one store, or of one tier of a store. ``None``: it does not report that.

    Counts and times are those since the process that was asked started.

    Attributes:
        store, place: its class, and its address without credentials.
        blocks: stored blocks.
        used_bytes, capacity_bytes: what they take, and may take.
        pinned_bytes: those of pinned blocks.
        loaded_bytes, saved_bytes: of blocks that were loaded and saved.
        load_s, save_s: the time that these calls took, in seconds.
        loads, saves, lookups: the number of calls.
        misses: lookups that did not find all wanted blocks.
        failures: calls that went wrong, whatever the kind.
        breaker_state: 0 closed, 1 half-open, 2 open.
    """

    store: str
    place: str
    blocks: int | None = None
    used_bytes: int | None = None
    capacity_bytes: int | None = None
    pinned_bytes: int | None = None
    loaded_bytes: int | None = None
    saved_bytes: int | None = None
    load_s: float | None = None
    save_s: float | None = None
    loads: int | None = None
    saves: int | None = None
    lookups: int | None = None
    misses: int | None = None
    failures: int | None = None
    breaker_state: int | None = None


@dataclass(slots=True)
class Overview:
    """The numbers of a server, or of a store alone, at one moment.

    Attributes:
        at: Unix seconds.
        engine: the engine of the process; ``None``: these are the numbers of a store alone, which
            knows no prompts: all but `stores` is empty.
        requests: that ended.
        live_requests: by state.
        prompt_tokens: of their prompts.
        reused_tokens: those of them that were not computed.
        ceiling_tokens: those that a cache without limits would have brought.
        lost_tokens: those that were computed although they might have been reused.
        outcomes: all of them, by outcome.
        hit_tokens: the reused ones by where they came from: ``device``, ``host``, ``store``.
        device_blocks: of the engine, by state.
        stores: those that are open.
    """

    at: float = field(default_factory=time.time)
    engine: str | None = None
    requests: int = 0
    live_requests: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    ceiling_tokens: float = 0.0
    lost_tokens: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    hit_tokens: dict[str, int] = field(default_factory=dict)
    device_blocks: dict[str, int] = field(default_factory=dict)
    stores: list[StoreNumbers] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        """Returns the fields, `stores` as dicts."""
        return asdict(self)

    @classmethod
    def of(cls, samples: Samples, engine: str) -> Overview:
        """Reads the numbers of a server from its metrics; those that it lacks count as 0."""
        outcomes = _by("outcome", samples.get("kvconnect_prompt_tokens_total", ()))
        hits = _by("tier", samples.get("kvconnect_hit_tokens_total", ()))
        return cls(
            engine=engine,
            requests=int(_sum(samples.get("kvconnect_requests_total", ()))),
            live_requests=_by("state", samples.get("kvconnect_live_requests", ())),
            prompt_tokens=sum(outcomes.values()),
            reused_tokens=sum(hits.values()),
            ceiling_tokens=_sum(samples.get("kvconnect_ceiling_tokens_total", ())),
            lost_tokens=sum(outcomes.get(str(reason), 0) for reason in LOST),
            outcomes=outcomes,
            hit_tokens=hits,
            device_blocks=_by("state", samples.get("kvconnect_device_blocks", ())),
            stores=_stores(samples),
        )

    @classmethod
    def now(cls) -> Overview:
        """Reads the numbers of this process; may block for half a second for each slow store."""
        taken = Snapshot.take()
        return cls.of(samples_of(taken), taken.engine)


def samples_of(taken: Snapshot) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Returns the samples of all metrics but the histograms."""
    return {
        metric.name: [
            (dict(zip(metric.labels, values, strict=True)), value)
            for values, value in metric.read(taken)
            if not isinstance(value, Distribution)
        ]
        for metric in METRICS
        if not metric.bounds
    }


def _sum(samples: Iterable[tuple[Mapping[str, str], float]]) -> float:
    return sum(value for _, value in samples)


def _by(label: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for labels, value in samples:
        found[labels[label]] = found.get(labels[label], 0) + int(value)
    return found


_FIELDS: Mapping[tuple[str, str | None], str] = {
    ("kvconnect_store_used_bytes", None): "used_bytes",
    ("kvconnect_store_capacity_bytes", None): "capacity_bytes",
    ("kvconnect_store_misses_total", None): "misses",
    ("kvconnect_store_failures_total", None): "failures",
    ("kvconnect_store_breaker_state", None): "breaker_state",
    ("kvconnect_store_bytes_total", "load"): "loaded_bytes",
    ("kvconnect_store_bytes_total", "save"): "saved_bytes",
    ("kvconnect_store_seconds_total", "load"): "load_s",
    ("kvconnect_store_seconds_total", "save"): "save_s",
    ("kvconnect_store_calls_total", "load"): "loads",
    ("kvconnect_store_calls_total", "save"): "saves",
    ("kvconnect_store_calls_total", "lookup"): "lookups",
}
"""The field of each metric of stores, or of the samples of one operation."""


def _stores(samples: Samples) -> list[StoreNumbers]:
    """Returns the numbers of the open stores: those that have a breaker."""
    opened = samples.get("kvconnect_store_breaker_state", ())
    found = {
        (labels["store"], labels["place"]): StoreNumbers(labels["store"], labels["place"])
        for labels, _ in opened
    }
    for (name, operation), field_ in _FIELDS.items():
        for labels, value in samples.get(name, ()):
            one = found.get((labels["store"], labels["place"]))
            if one is not None and labels.get("operation") == operation:
                number = value if field_.endswith("_s") else int(value)
                setattr(one, field_, (getattr(one, field_) or 0) + number)
    return list(found.values())
