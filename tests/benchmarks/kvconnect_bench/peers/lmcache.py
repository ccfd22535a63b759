"""The process of LMCache's storage backends, in an interpreter that has LMCache.

As in its engine, values lie in LMCache's own host buffers before a put and after a get. The values
of its memory backend are those buffers, so a copy into or out of a buffer counts as well.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any

import numpy as np

from kvconnect_bench.blocks.worker import serve, take_stdout

_LOOKUPS = 16
_TIMEOUT_S = 120.0
_PARTS = ("", "kv_bytes", "metadata")  # suffixes that its clients for Redis add to a key


class Bench:
    """A backend with its values; every call of `round` is a round.

    Args:
        kind: ``memory``, ``disk``, ``redis`` or ``resp`` (LMCache's client in C++).
        place: directory, or ``host:port``.
        nbytes: of a value.
        count: number of values.
        batch: values of one call.
    """

    def __init__(self, kind: str, place: str, nbytes: int, count: int, batch: int) -> None:
        torch = import_module("torch")
        settings: dict[str, Any] = {
            "chunk_size": 256,
            "local_cpu": kind == "memory",
            "max_local_cpu_size": (2 * nbytes * count + (256 << 20)) / 2**30,
        }
        if kind == "disk":
            settings |= {
                "local_disk": place,
                "max_local_disk_size": 1024,  # GiB: what was removed still counts
                "extra_config": {"use_odirect": True},
            }
        self._place = place if kind in {"redis", "resp"} else ""
        if self._place:
            settings |= {"remote_url": f"{kind}://{place}", "remote_serde": "naive"}
        config = import_module("lmcache.v1.config").LMCacheEngineConfig.from_defaults(**settings)
        shape = torch.Size([1, 2, 256, 1, nbytes // 2 // 256])
        metadata = import_module("lmcache.v1.metadata").LMCacheMetadata(
            model_name="bench",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.uint8,
            kv_shape=tuple(shape),
        )
        backends = "lmcache.v1.storage_backend"
        cpu = import_module(f"{backends}.local_cpu_backend")
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._memory = cpu.LocalCPUBackend(config, metadata, "cpu")
        if kind == "memory":
            self._backend = self._memory
        elif kind == "disk":
            disk = import_module(f"{backends}.local_disk_backend")
            self._backend = disk.LocalDiskBackend(
                config, self._loop, self._memory, "cpu", metadata=metadata
            )
        else:
            remote = import_module(f"{backends}.remote_backend")
            self._backend = remote.RemoteBackend(config, metadata, self._loop, self._memory, "cpu")
            if self._backend.connection is None:
                raise RuntimeError(f"LMCache cannot connect to {kind}://{place}")
        self._kind, self._batch = kind, batch
        self._shape, self._dtype = torch.Size([2, 1, 256, nbytes // 2 // 256]), torch.uint8
        key = import_module("lmcache.utils").CacheEngineKey
        self._keys = [key("bench", 1, 0, number, torch.uint8) for number in range(count)]
        whole = np.random.default_rng(nbytes).integers(0, 256, nbytes * count, np.uint8)
        self._values = np.split(whole, count)
        self._targets = np.split(np.ones_like(whole), count) if self._hot else []
        self._objects = [] if self._hot else [self._allocated(value) for value in self._values]

    def round(self) -> dict[str, float]:
        """Returns the seconds to put everything, to get everything, and to look up one key."""
        put = _seconds(self._put)
        lookups = [_seconds(lambda: self._backend.contains(self._keys[0])) for _ in range(_LOOKUPS)]
        get = self._get()
        self._forget()
        return {"put": put, "get": get, "lookup": statistics.median(lookups)}

    def _forget(self) -> None:
        if not self._place:
            for key in self._keys:
                self._backend.remove(key)
            return
        # Its client cannot remove values; and overwriting costs a server less than storing.
        stems = [key.to_string() for key in self._keys]
        with import_module("redis").Redis.from_url(f"redis://{self._place}") as server:
            server.unlink(*(stem + part for stem in stems for part in _PARTS))

    @property
    def _hot(self) -> bool:
        return self._kind == "memory"

    def _allocated(self, value: Any) -> Any:
        found = self._memory.allocate(self._shape, self._dtype)
        np.copyto(_bytes(found), value)
        return found

    def _put(self) -> None:
        if self._hot:
            for key, value in zip(self._keys, self._values, strict=True):
                found = self._allocated(value)
                self._backend.submit_put_task(key, found)
                found.ref_count_down()
            return
        left = threading.Semaphore(0)
        for part in self._parts():
            self._backend.batched_submit_put_task(
                self._keys[part],
                self._objects[part],
                on_complete_callback=lambda _: left.release(),
            )
        for _ in self._keys:
            if not left.acquire(timeout=_TIMEOUT_S):
                raise RuntimeError("a value was not stored in time")

    def _get(self) -> float:
        spent = 0.0
        for part in self._parts():
            start = time.perf_counter()
            found = self._fetch(self._keys[part])
            if self._hot:
                for one, target in zip(found, self._targets[part], strict=True):
                    np.copyto(target, _bytes(one))
            spent += time.perf_counter() - start
            for one, value in zip(found, self._values[part], strict=True):
                if one is None or not np.array_equal(_bytes(one), value):
                    raise RuntimeError("LMCache gave back other bytes")
                one.ref_count_down()
        return spent

    def _fetch(self, keys: Sequence[Any]) -> list[Any]:
        if self._hot:
            return [self._backend.get_blocking(key) for key in keys]
        found: list[Any] = self._backend.batched_get_blocking(list(keys))
        return found

    def _parts(self) -> list[slice]:
        count = len(self._keys)
        return [slice(at, min(at + self._batch, count)) for at in range(0, count, self._batch)]


def _bytes(found: Any) -> Any:
    return np.frombuffer(found.byte_array, np.uint8)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    """Serves until standard input ends."""
    answers = take_stdout()
    import_module("lmcache")
    benches: dict[str, Bench] = {}

    def start(**what: Any) -> str:
        benches.clear()
        benches["now"] = Bench(**what)
        return "ready"

    def measure() -> dict[str, float]:
        return benches["now"].round()

    serve(
        answers,
        {"version": version("lmcache"), "python": sys.version.split()[0]},
        {"start": start, "round": measure},
    )


if __name__ == "__main__":
    main()
