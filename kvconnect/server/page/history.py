"""The last hour of the counts that the page draws."""

from __future__ import annotations

import threading
from collections import deque

from kvconnect.prometheus import Snapshot
from kvconnect.prometheus.overview import Overview, samples_of
from kvconnect.trace import metrics

INTERVAL_S = 10.0
"""The time between two samples."""

_SAMPLES = 360
_STORES = 16
"""The stores of a sample at most."""


class History:
    """A sample of the counters every 10 s, for an hour; reads no store. `close` ends its thread."""

    def __init__(self) -> None:
        self._samples: deque[dict[str, object]] = deque(maxlen=_SAMPLES)
        self._closed = threading.Event()
        self._sample()
        self._thread = threading.Thread(target=self._run, name="kvconnect-page", daemon=True)
        self._thread.start()

    def samples(self) -> list[dict[str, object]]:
        """Returns the samples, oldest first, and the present counts as the last one.

        ``stores`` of each has the bytes that were loaded and saved, by ``[store, place]``.
        """
        return [*list(self._samples), _now()]

    def close(self) -> None:
        """Takes no more samples; the second time does nothing."""
        self._closed.set()
        self._thread.join()

    def _sample(self) -> None:
        self._samples.append(_now())

    def _run(self) -> None:
        while not self._closed.wait(INTERVAL_S):
            self._sample()


def _now() -> dict[str, object]:
    # Without gauges, for which stores would be asked.
    taken = Snapshot(metrics.engine, metrics.by_labels(), {}, ())
    samples = samples_of(taken)
    found = Overview.of(samples, taken.engine)
    moved: dict[tuple[str, str], list[float]] = {}
    for labels, value in samples["kvconnect_store_bytes_total"]:
        at = ("load", "save").index(labels["operation"])
        moved.setdefault((labels["store"], labels["place"]), [0, 0])[at] += value
    return {
        "at": found.at,
        "requests": found.requests,
        "prompt_tokens": found.prompt_tokens,
        "reused_tokens": found.reused_tokens,
        "ceiling_tokens": found.ceiling_tokens,
        "lost_tokens": found.lost_tokens,
        "stores": [[*store, *sums] for store, sums in list(moved.items())[:_STORES]],
    }
