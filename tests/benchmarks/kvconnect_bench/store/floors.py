"""Chooses the floor of a store."""

from __future__ import annotations

from kvconnect.backend import Backend
from kvconnect.backends.disk.store import DiskBackend
from kvconnect.backends.memory.store import MemoryBackend
from kvconnect.bench.store.floor import Floor
from kvconnect.bench.store.payloads import Payloads
from kvconnect_bench.store.floor_disk import DiskFloor
from kvconnect_bench.store.floor_memory import MemoryFloor
from kvconnect_bench.store.floor_redis import RedisFloor


def make_floor(url: str, store: Backend, payloads: Payloads) -> Floor | None:
    """Returns the floor of an open `store`, or ``None`` if there is none for its kind."""
    if isinstance(store, MemoryBackend):
        return MemoryFloor(payloads)
    if isinstance(store, DiskBackend):
        return DiskFloor(payloads, store.path)
    if url.startswith(("redis:", "rediss:")):
        return RedisFloor(payloads, url)
    if url.startswith("s3:"):
        from kvconnect_bench.store.floor_s3 import open_floor

        return open_floor(url, payloads)
    return None
