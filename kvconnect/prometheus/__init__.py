"""Exports the counts of `kvconnect.trace` to Prometheus.

``serve(9464)`` answers scrapes on a port of its own; ``registry.register(Collector())`` adds the
same to an existing registry of the application. Nothing is counted twice, and nothing is computed
between scrapes.

Imports the vocabulary. Begin with `table`, which lists every metric; `readers` reads their samples
from a `snapshot`, `server` serves them.
"""

from __future__ import annotations

from kvconnect.prometheus.server import Collector, MetricsServer, serve
from kvconnect.prometheus.snapshot import Metric, Snapshot
from kvconnect.prometheus.table import METRICS

__all__ = ["METRICS", "Collector", "Metric", "MetricsServer", "Snapshot", "serve"]
