"""What `kvconnect.trace` counts, for Prometheus.

``serve(9464)`` answers scrapes on a port of its own; ``registry.register(Collector())`` adds the
same to a registry that the application has already. Nothing is counted twice, and nothing is done
between scrapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self, TypeAlias

from kvconnect.errors import ConfigurationError, MissingExtra
from kvconnect.trace import Gauge, Labels, metrics

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily

__all__ = ["METRICS", "Collector", "Metric", "MetricsServer", "Snapshot", "serve"]

_OPERATIONS = ("lookup", "load", "save", "delete", "children", "open", "close")
_MOVES = {"load": "loaded", "save": "saved"}

Sample: TypeAlias = tuple[tuple[str, ...], float]
"""Values of a metric's labels, in its order, and its own."""


Store: TypeAlias = tuple[str, str]
"""Its labels ``store`` and ``place``."""

_NONE: Store = ("", "")


def _store(labels: Labels) -> Store:
    told = dict(labels)
    return told.get("store", ""), told.get("place", "")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All counters and gauges at one moment."""

    counters: Mapping[Labels, Mapping[str, float]]
    gauges: tuple[Gauge, ...]

    @classmethod
    def take(cls) -> Self:
        """Of this process; may block for half a second for each store that is slow to tell."""
        return cls(metrics.by_labels(), tuple(metrics.gauges()))

    def total(self, name: str) -> float:
        """A counter over all labels."""
        return sum(counters.get(name, 0) for counters in self.counters.values())

    def stores(self) -> Iterator[tuple[Store, Mapping[str, float]]]:
        """The counters of each store."""
        for labels, counters in self.counters.items():
            store = _store(labels)
            if store != _NONE:
                yield store, counters

    def gauge(self, name: str) -> dict[Store, float]:
        """A gauge by store; those that are of none added up."""
        found: dict[Store, float] = {}
        for gauge in self.gauges:
            if gauge.name == name:
                store = _store(gauge.labels)
                found[store] = found.get(store, 0) + gauge.value
        return found


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its name, what it is, and how it is read from a `Snapshot`."""

    name: str
    kind: Literal["counter", "gauge"]
    labels: tuple[str, ...]
    help: str
    read: Callable[[Snapshot], Iterable[Sample]]


# ---------------------------------------------------------------------- how each is read


def _sum(*names: str) -> Callable[[Snapshot], Iterable[Sample]]:
    return lambda now: [((), sum(now.total(name) for name in names))]


def _each(names: Mapping[tuple[str, ...], str]) -> Callable[[Snapshot], Iterable[Sample]]:
    return lambda now: [(values, now.total(name)) for values, name in names.items()]


def _by_operation(suffix: str) -> Callable[[Snapshot], Iterable[Sample]]:
    def read(now: Snapshot) -> Iterator[Sample]:
        for store, counters in now.stores():
            for operation in _OPERATIONS:
                if f"store.{operation}" in counters:
                    yield (*store, operation), counters.get(f"store.{operation}{suffix}", 0)

    return read


def _moved(suffix: str | None) -> Callable[[Snapshot], Iterable[Sample]]:
    def read(now: Snapshot) -> Iterator[Sample]:
        for store, counters in now.stores():
            for operation, moved in _MOVES.items():
                if f"store.{operation}" in counters:
                    yield (
                        (*store, operation),
                        counters.get(f"store.{operation}.{suffix or moved}", 0),
                    )

    return read


def _misses(now: Snapshot) -> Iterator[Sample]:
    for store, counters in now.stores():
        yield store, counters.get("store.lookup.misses", 0)


def _failures(now: Snapshot) -> Iterator[Sample]:
    for store, counters in now.stores():
        for kind in ("failure", "timeout", "refused", "bad_frame", "other_codec"):
            yield (*store, kind), counters.get(f"store.{kind}", 0)


def _openings(now: Snapshot) -> Iterator[Sample]:
    for store, counters in now.stores():
        yield store, counters.get("store.breaker.opened", 0)


def _gauge(name: str) -> Callable[[Snapshot], Iterable[Sample]]:
    return lambda now: now.gauge(name).items()


def _calls_in_flight(now: Snapshot) -> Iterator[Sample]:
    abandoned = now.gauge("store.abandoned")
    for store, running in now.gauge("store.running").items():
        yield (*store, "in_time"), running - abandoned.get(store, 0)
        yield (*store, "abandoned"), abandoned.get(store, 0)


def _parts(prefix: str, names: tuple[str, ...]) -> Callable[[Snapshot], Iterable[Sample]]:
    def read(now: Snapshot) -> Iterator[Sample]:
        for name in names:
            for value in now.gauge(f"{prefix}.{name}").values():
                yield (name,), value

    return read


_Names: TypeAlias = dict[tuple[str, ...], str]
_TIERS: _Names = {(tier,): f"engine.request.{tier}_tokens" for tier in ("device", "host", "store")}
_TRANSFERS: _Names = {
    (direction, state): f"connector.{direction}.{state}"
    for direction in ("load", "save")
    for state in ("completed", "failed", "cancelled", "timed_out")
}

METRICS: tuple[Metric, ...] = (
    Metric(
        "kvconnect_requests_total",
        "counter",
        (),
        "Requests that ended; each looked its prompt up.",
        _sum("engine.request"),
    ),
    Metric(
        "kvconnect_prompt_tokens_total",
        "counter",
        (),
        "Tokens of their prompts.",
        _sum("engine.request.prompt_tokens"),
    ),
    Metric(
        "kvconnect_hit_tokens_total",
        "counter",
        ("tier",),
        "Prompt tokens that were not computed, by where their KV came from: device, host or store.",
        _each(_TIERS),
    ),
    Metric(
        "kvconnect_device_blocks",
        "gauge",
        ("state",),
        "KV blocks on the device: used by requests, or free (perhaps cached).",
        _parts("engine.blocks", ("used", "free")),
    ),
    Metric(
        "kvconnect_host_blocks_total",
        "counter",
        ("direction",),
        "Blocks moved to the host tier (offload) and back (onboard).",
        _each({("offload",): "cache.offload.blocks", ("onboard",): "cache.onboard.blocks"}),
    ),
    Metric(
        "kvconnect_late_lookups_total",
        "counter",
        (),
        "Admissions that did not wait longer for the store's answer.",
        _sum("connector.lookup.late"),
    ),
    Metric(
        "kvconnect_transfers_total",
        "counter",
        ("direction", "state"),
        "Loads and saves of requests, by how they ended.",
        _each(_TRANSFERS),
    ),
    Metric(
        "kvconnect_unsaved_blocks_total",
        "counter",
        ("reason",),
        "Blocks that were not saved: no room to stage them (dropped), or the store failed (lost).",
        _each(
            {
                ("dropped",): "connector.save.dropped.blocks",
                ("lost",): "connector.save.lost.blocks",
            }
        ),
    ),
    Metric(
        "kvconnect_staging_bytes",
        "gauge",
        ("use",),
        "Host memory for blocks on their way: taken by loads, by saves, or free.",
        _parts("connector.staging", ("load", "save", "free")),
    ),
    Metric(
        "kvconnect_store_calls_total",
        "counter",
        ("store", "place", "operation"),
        "Calls to a store, whatever came of them; refused ones too.",
        _by_operation(""),
    ),
    Metric(
        "kvconnect_store_seconds_total",
        "counter",
        ("store", "place", "operation"),
        "Time that they took.",
        _by_operation(".seconds"),
    ),
    Metric(
        "kvconnect_store_blocks_total",
        "counter",
        ("store", "place", "operation"),
        "Blocks that were loaded and found sound, or saved.",
        _moved(None),
    ),
    Metric(
        "kvconnect_store_bytes_total",
        "counter",
        ("store", "place", "operation"),
        "Bytes of these blocks, before codecs.",
        _moved("bytes"),
    ),
    Metric(
        "kvconnect_store_misses_total",
        "counter",
        ("store", "place"),
        "Lookups that did not find all they asked for. No failure.",
        _misses,
    ),
    Metric(
        "kvconnect_store_failures_total",
        "counter",
        ("store", "place", "kind"),
        "What went wrong: failure (the store's error), timeout, refused (by the open breaker), "
        "bad_frame (damaged, dropped), other_codec (sound, of no use here).",
        _failures,
    ),
    Metric(
        "kvconnect_store_breaker_state",
        "gauge",
        ("store", "place"),
        "0: closed, the store is used; 1: half-open, it is probed; 2: open, it is left alone.",
        _gauge("store.breaker_state"),
    ),
    Metric(
        "kvconnect_store_breaker_openings_total",
        "counter",
        ("store", "place"),
        "How often the breaker opened.",
        _openings,
    ),
    Metric(
        "kvconnect_store_calls_in_flight",
        "gauge",
        ("store", "place", "state"),
        "Calls that have not ended: in_time, or abandoned at their deadline.",
        _calls_in_flight,
    ),
    Metric(
        "kvconnect_store_used_bytes",
        "gauge",
        ("store", "place"),
        "Bytes that blocks take in a store that knows.",
        _gauge("store.bytes"),
    ),
    Metric(
        "kvconnect_store_capacity_bytes",
        "gauge",
        ("store", "place"),
        "Bytes that they may take.",
        _gauge("store.capacity"),
    ),
)
"""All metrics, in the order of ``docs/metrics.md``."""


class Collector:
    """Gives `METRICS` to a Prometheus registry.

    Raises:
        MissingExtra: prometheus-client is not installed.
    """

    def __init__(self) -> None:
        try:
            from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
        except ImportError as error:
            raise MissingExtra("metrics for Prometheus", "metrics") from error
        self._families = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}

    def describe(self) -> Iterable[Family]:
        """The metrics without values; reads nothing."""
        return [self._family(metric) for metric in METRICS]

    def collect(self) -> Iterator[Family]:
        """The metrics as they are now. Called on the thread of a scrape."""
        now = Snapshot.take()
        for metric in METRICS:
            family = self._family(metric)
            for values, value in metric.read(now):
                family.add_metric(values, value)
            yield family

    def _family(self, metric: Metric) -> Family:
        family: Family = self._families[metric.kind](metric.name, metric.help, labels=metric.labels)
        return family


class MetricsServer:
    """Answers scrapes until it is closed; a context manager.

    Attributes:
        port: where.
    """

    def __init__(self, port: int, address: str) -> None:
        collector = Collector()
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        registry.register(collector)
        try:
            self._server, self._thread = start_http_server(port, address, registry)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(
                f"metrics port {port}: cannot be listened to on {address}: {error}"
            ) from error
        self.port: int = self._server.server_port

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(port: int, address: str = "0.0.0.0") -> MetricsServer:  # noqa: S104  sizes, no content
    """Answer Prometheus on `port` (0: any that is free), on a thread of its own.

    Raises:
        ConfigurationError: the port cannot be had.
        MissingExtra: prometheus-client is not installed.
    """
    return MetricsServer(port, address)
