"""The floor of memory: copies between two places."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvconnect.bench.store.floor import Floor, median_seconds, seconds_on_threads
from kvconnect.bench.store.payloads import Payloads


class MemoryFloor(Floor):
    """Copies between two places of memory that were touched before, on one thread or two."""

    name = "memcpy"

    def __init__(self, payloads: Payloads) -> None:
        super().__init__(payloads)
        whole = np.ones(payloads.total, np.uint8)
        self._kept = list(whole.reshape(payloads.count, payloads.nbytes))

    def put(self) -> list[float]:
        """Copies all values; returns the seconds on one thread and on two."""
        sources = [block.data.numpy() for block in self.payloads.blocks]
        return self._copy(sources, self._kept)

    def get(self) -> list[float]:
        """Copies all values back; returns the seconds on one thread and on two."""
        return self._copy(self._kept, [data.numpy() for data in self.payloads.into])

    def lookup(self, keys: int) -> float:
        """Returns the seconds to find the keys in a dict."""
        return dict_lookup_seconds(self.payloads, keys)

    @staticmethod
    def _copy(
        sources: list[np.ndarray[Any, Any]], targets: list[np.ndarray[Any, Any]]
    ) -> list[float]:
        pairs = list(zip(targets, sources, strict=True))
        return [
            seconds_on_threads(threads, lambda pair: np.copyto(*pair), pairs) for threads in (1, 2)
        ]


def dict_lookup_seconds(payloads: Payloads, keys: int) -> float:
    """Returns the seconds to find so many keys in a dict; blocks."""
    index = {key: number for number, key in enumerate(payloads.keys)}
    asked = payloads.asked(keys)
    return median_seconds(lambda: [index.get(key) for key in asked])
