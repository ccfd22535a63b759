"""What the URL of a disk store says, and what it is opened for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvconnect.backend import Access

__all__ = ["DiskSettings", "Durability"]

Durability = Literal["process", "power"]


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """What a disk store's URL says, see `DiskBackend`, and how long whole blocks are."""

    path: Path
    capacity: int | None = None
    durability: Durability = "process"
    ttl: float | None = None
    frame_sizes: frozenset[int] = frozenset()
    access: Access = "store"
