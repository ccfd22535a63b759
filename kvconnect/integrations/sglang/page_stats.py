"""The page counts of batches, in the class that SGLang exports metrics from."""

from __future__ import annotations

from collections import deque
from importlib import import_module
from typing import Any

# Batches between two queries of SGLang, which never queries without metrics.
_MOST = 4096


class PageStats:
    """The batches since SGLang's last query; only the newest are kept. Thread-safe.

    Args:
        page_nbytes: the bytes of a page with this rank's heads and layers.
    """

    def __init__(self, page_nbytes: int) -> None:
        self._page_nbytes = page_nbytes
        self._loaded: deque[tuple[int, float]] = deque(maxlen=_MOST)
        self._saved: deque[int] = deque(maxlen=_MOST)

    def add_load(self, num_pages: int, seconds: float) -> None:
        """Records a batch of which `num_pages` pages were loaded."""
        if num_pages:
            self._loaded.append((num_pages, seconds))

    def add_save(self, num_pages: int) -> None:
        """Records a batch of which `num_pages` pages are being saved."""
        if num_pages:
            self._saved.append(num_pages)

    def take(self) -> Any:
        """Returns SGLang's ``StorageMetrics`` since the last call; ``None`` without SGLang.

        Bandwidths are in GB/s. The bandwidth of backups is left out: pages are written in the
        background.
        """
        try:
            module = import_module("sglang.srt.observability.metrics_collector")
        except ImportError:
            return None
        found = module.StorageMetrics()
        for num_pages, seconds in _drain(self._loaded):
            found.prefetch_pgs.append(num_pages)
            if seconds:
                found.prefetch_bandwidth.append(num_pages * self._page_nbytes / seconds / 1e9)
        found.backup_pgs.extend(_drain(self._saved))
        return found


def _drain(batches: deque[Any]) -> list[Any]:
    return [batches.popleft() for _ in range(len(batches))]
