"""The metrics in a Prometheus registry, and a server for scrapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from kvconnect.errors import ConfigurationError, MissingExtra
from kvconnect.prometheus.snapshot import Distribution, Metric, Snapshot
from kvconnect.prometheus.table import METRICS

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class Collector:
    """Gives `METRICS` to a Prometheus registry, each with the label ``engine``.

    Raises:
        MissingExtra: prometheus-client is not installed.
    """

    def __init__(self) -> None:
        try:
            from prometheus_client.core import (
                CounterMetricFamily,
                GaugeMetricFamily,
                HistogramMetricFamily,
            )
        except ImportError as error:
            raise MissingExtra("metrics for Prometheus", "metrics") from error
        self._families = {
            "counter": CounterMetricFamily,
            "gauge": GaugeMetricFamily,
            "histogram": HistogramMetricFamily,
        }

    def describe(self) -> Iterable[Family]:
        """Returns the metrics without values; reads nothing."""
        return [self._family(metric) for metric in METRICS]

    def collect(self) -> Iterator[Family]:
        """Yields the present metrics. Called on the thread of a scrape."""
        now = Snapshot.take()
        for metric in METRICS:
            family = self._family(metric)
            for values, value in metric.read(now):
                numbers: tuple[Any, ...] = (value,)
                if isinstance(value, Distribution):
                    numbers = _cumulated(metric, value)
                family.add_metric([now.engine, *values], *numbers)
            yield family

    def _family(self, metric: Metric) -> Family:
        family: Family = self._families[metric.kind](
            metric.name, metric.help, labels=["engine", *metric.labels]
        )
        return family


def _cumulated(metric: Metric, found: Distribution) -> tuple[list[tuple[str, float]], float]:
    """Returns the buckets as Prometheus has them, each with all below it, and the sum."""
    bounds = [*(f"{bound:.15g}" for bound in metric.bounds), "+Inf"]
    return list(zip(bounds, accumulate(found.buckets), strict=True)), found.total


class MetricsServer:
    """Answers scrapes until it is closed; a context manager.

    Attributes:
        port: the port that it listens on.
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
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(port: int, address: str = "127.0.0.1") -> MetricsServer:
    """Answers Prometheus on `port` (0: any that is free), on a thread of its own.

    Every client of `address` may read the metrics: by default programs of this machine only;
    ``0.0.0.0`` and ``::`` are all of its addresses.

    Raises:
        ConfigurationError: the port cannot be listened to at `address`.
        MissingExtra: prometheus-client is not installed.
    """
    return MetricsServer(port, address)
