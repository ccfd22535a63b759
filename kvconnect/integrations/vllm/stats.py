"""The counts of kvconnect that vLLM logs and exports."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from kvconnect.trace import metrics

COUNTERS: Mapping[str, tuple[str, str]] = {
    "connector.load.blocks.blocks": ("loaded_blocks", "Blocks loaded from the store."),
    "connector.load.failed": ("failed_loads", "Loads that failed; their tokens were computed."),
    "connector.lookup.late": ("late_lookups", "Admissions that did not wait for the store."),
    "connector.lookup.failed": ("failed_lookups", "Lookups that failed."),
    "connector.save.dropped.blocks": ("dropped_blocks", "Blocks that there was no room to stage."),
    "connector.save.lost.blocks": ("lost_blocks", "Blocks that the store did not take."),
    "engine.request.uncached": ("uncached_requests", "Requests whose KV cannot be told apart."),
    "store.load.loaded": ("store_loaded_blocks", "Blocks read from the store and found sound."),
    "store.load.bytes": ("store_loaded_bytes", "Bytes of these, before codecs."),
    "store.save.saved": ("store_saved_blocks", "Blocks written to the store."),
    "store.save.bytes": ("store_saved_bytes", "Bytes of these, before codecs."),
}
"""The counters of kvconnect by name, each with vLLM's name and a description."""


class CounterSteps:
    """The increase of this process's `COUNTERS` since the last call of `take`. Thread-safe.

    A process has one, since scheduler and worker may share a process and nothing must count twice.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: dict[str, float] = {}
        self._num_events = 0

    def take(self) -> dict[str, float]:
        """Returns the increases by the names of `COUNTERS`, without zeros."""
        if metrics.num_events == self._num_events:
            return {}
        with self._lock:
            self._num_events = metrics.num_events  # later increases count in the next call
            now = metrics.snapshot()
            moved = {}
            for counter, (name, _) in COUNTERS.items():
                value = now.get(counter, 0.0)
                if value != self._told.get(counter, 0.0):
                    moved[name] = value - self._told.get(counter, 0.0)
                    self._told[counter] = value
            return moved
