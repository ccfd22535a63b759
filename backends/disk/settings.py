"""What the URL of a disk store says, and what it is opened for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Access", "DiskSettings", "Durability"]

Durability = Literal["process", "power"]

Access = Literal["store", "read", "maintain"]
"""What a directory is opened for: to be a store; to be read without leaving a trace, use included;
or to delete from it, whatever its capacity. The latter two do not make one."""


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """What a disk store's URL says, see `DiskBackend`, and how long whole blocks are."""

    path: Path
    capacity: int | None = None
    durability: Durability = "process"
    ttl: float | None = None
    frame_sizes: frozenset[int] = frozenset()
    access: Access = "store"
