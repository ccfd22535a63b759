"""How many pages went through, in the class that SGLang exports metrics from."""

from __future__ import annotations

from collections import deque
from importlib import import_module
from typing import Any

__all__ = ["PageStats"]

# Batches between two of SGLang's questions; without metrics it asks never.
_MOST = 4096


class PageStats:
    """Batches since SGLang asked last, the newest of many. Thread-safe.

    Args:
        page_nbytes: of a page with this rank's heads and layers.
    """

    def __init__(self, page_nbytes: int) -> None:
        self._page_nbytes = page_nbytes
        self._loaded: deque[tuple[int, float]] = deque(maxlen=_MOST)
        self._saved: deque[int] = deque(maxlen=_MOST)

    def add_load(self, num_pages: int, seconds: float) -> None:
        """A batch was loaded, so many pages of it."""
        if num_pages:
            self._loaded.append((num_pages, seconds))

    def add_save(self, num_pages: int) -> None:
        """So many pages of a batch are on their way to the store."""
        if num_pages:
            self._saved.append(num_pages)

    def take(self) -> Any:
        """SGLang's ``StorageMetrics`` of what came since the last call; ``None`` without SGLang.

        Bandwidths are in GB/s. That of backups is left out: pages are written in the background.
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
