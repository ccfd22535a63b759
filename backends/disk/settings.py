"""The settings of a disk store: the parameters of its URL, and the access."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvconnect.backend import DEFAULT_PIN_FRACTION, Access
from kvconnect.backends.quotas import Quotas

Durability = Literal["process", "power"]


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """The settings of a disk store's URL, see `DiskBackend`, and the lengths of whole blocks."""

    path: Path
    capacity: int | None = None
    durability: Durability = "process"
    ttl: float | None = None
    pin_fraction: float = DEFAULT_PIN_FRACTION
    frame_sizes: frozenset[int] = frozenset()
    access: Access = "store"
    quotas: Quotas | None = None
