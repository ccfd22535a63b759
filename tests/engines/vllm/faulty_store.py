"""Stores whose faults a test sets: ``faulty://NAME`` in memory, ``faulty://NAME/PATH`` on disk.

The name may be empty. They are known where this module was imported.
"""

from __future__ import annotations

from typing import Any

from kvconnect.backends import registry
from kvconnect.backends.disk import from_url as disk
from kvconnect.backends.memory import from_url as memory
from kvconnect.backends.url import StoreUrl
from kvconnect.testing.faults.faulty_backend import FaultyBackend

SIZE = "capacity=64MiB"

STORES: dict[str, FaultyBackend] = {}


def from_url(url: Any) -> FaultyBackend:
    """A new one, in `STORES` by its name."""
    inner = memory(StoreUrl.parse(f"memory:?{SIZE}"))
    if url.path:
        inner = disk(StoreUrl.parse(f"disk://{url.path}?{SIZE}"))
    made = STORES[url.location] = FaultyBackend(inner)
    return made


registry._BUILT_IN["faulty"] = f"{__name__}:from_url"
