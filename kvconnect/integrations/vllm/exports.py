"""The statistics in vLLM's own classes, for its log and for its API server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvconnect.integrations.vllm.stats import COUNTERS


@dataclass
class KvConnectStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not there
    """The increase of kvconnect's counters since the last step, by name."""

    def reset(self) -> None:
        """Clears the counts."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds the counts of another worker, or of the scheduler."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0.0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns the counts that are logged for an interval."""
        return {name.replace("_", " "): int(value) for name, value in self.data.items()}

    def is_empty(self) -> bool:
        """Returns whether there are no counts."""
        return not self.data


class KvConnectPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # vLLM is not there
    """The counters of kvconnect among vLLM's own, ``vllm:kvconnect_…``, with its labels."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(
                name=f"vllm:kvconnect_{name}", documentation=text, labelnames=labelnames
            )
            for name, text in COUNTERS.values()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds the counts of one step of an engine."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            self._counters[name].labels(*labels).inc(value)
