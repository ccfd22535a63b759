"""A store in memory whose faults a test sets, by the URL ``faulty://NAME``.

One whose name begins with ``background`` is too slow to load in the step that computes, it says.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvconnect.backends import registry
from kvconnect.backends.memory import from_url as memory
from kvconnect.backends.url import StoreUrl
from kvconnect.testing.faults.faulty_backend import FaultyBackend

STORES: dict[str, FaultyBackend] = {}


def from_url(url: Any) -> FaultyBackend:
    """A new one, in `STORES` by its name."""
    made = STORES[url.location] = FaultyBackend(memory(StoreUrl.parse("memory:?capacity=64MiB")))
    if url.location.startswith("background"):
        made.capabilities = replace(made.capabilities, inline=False)
    return made


def install() -> None:
    """Make the scheme known."""
    registry._BUILT_IN["faulty"] = f"{__name__}:from_url"
