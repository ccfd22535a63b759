"""The buckets of the event values that `kvconnect.trace` counts as histograms."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["BOUNDS", "SIZES", "TIMES"]

TIMES = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""The upper bounds of the buckets of times, in seconds."""

SIZES = tuple(float(4096 << 2 * step) for step in range(10))
"""The upper bounds of the buckets of sizes, in bytes: 4 KiB, 16 KiB, … 1 GiB."""

_CALLS = ("lookup", "load", "save", "delete", "children", "open", "close")

BOUNDS: Mapping[str, Mapping[str, tuple[float, ...]]] = MappingProxyType(
    {
        "server.first_token": {"seconds": TIMES},
        "server.between_tokens": {"seconds": TIMES},
        **{f"store.{call}": {"seconds": TIMES} for call in _CALLS},
        **{f"store.{call}": {"seconds": TIMES, "bytes": SIZES} for call in ("load", "save")},
    }
)
"""The upper bounds of the buckets, by event and by name of the value."""
