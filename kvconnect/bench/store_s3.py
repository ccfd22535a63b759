"""What the S3 store gets out of a plain HTTP server, and what else there is to compare it with.

``python -m kvconnect.bench.store_s3`` measures and prints. Beside the store, in the same rounds:
boto3's ordinary way to read (``get_object()["Body"].read()``), of objects of the same length; and
raw sockets, which is as fast as it can be.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import boto3
import torch
from torch import Tensor

from kvconnect.backend import Backend, StoredBlock
from kvconnect.backends.registry import open_backend
from kvconnect.backends.s3 import S3Backend
from kvconnect.backends.s3_settings import S3Settings
from kvconnect.bench.report import Figure, render
from kvconnect.bench.store_s3_server import plain_server
from kvconnect.frame import frame_nbytes
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout

__all__ = ["measure", "raw_get_seconds", "raw_put_seconds"]

_BUCKET = "bench"


def measure(block_nbytes: int, count: int, *, repeats: int = 15) -> list[Figure]:
    """Load and save `count` blocks that share an object, beside the other ways. Blocks.

    Args:
        block_nbytes: payload of a block.
        count: blocks of one call.
        repeats: rounds; in each everything is measured once, the median counts.
    """
    with plain_server() as endpoint, _credentials():
        seconds = asyncio.run(_Bench(endpoint, block_nbytes, count).run(repeats))
    median = {name: statistics.median(times) for name, times in seconds.items()}
    nbytes = frame_nbytes(block_nbytes) * count
    figures = [Figure(name, nbytes / value / 1e9, "GB/s") for name, value in median.items()]
    return [
        *figures,
        _ratio("GET / ordinary, one object", median, "GET, ordinary, one object", "GET", ">= 3"),
        _ratio("GET / ordinary, each block", median, "GET, ordinary, each block", "GET"),
        _ratio("GET / raw socket", median, "GET, raw socket", "GET"),
        _ratio("PUT / ordinary, one object", median, "PUT, ordinary, one object", "PUT"),
        _ratio("PUT / raw socket", median, "PUT, raw socket", "PUT"),
    ]


def _ratio(title: str, median: dict[str, float], other: str, ours: str, target: str = "") -> Figure:
    return Figure(title, median[other] / median[ours], "x", target)


class _Bench:
    def __init__(self, endpoint: str, block_nbytes: int, count: int) -> None:
        self._endpoint = endpoint
        self._layout = KvCacheLayout(1, 1, block_nbytes // 4, block_nbytes // 4, 2, torch.uint8)
        nbytes = frame_nbytes(self._layout.block_nbytes)
        self._total = nbytes * count
        keys = [BlockKey(hashlib.blake2b(b"%d" % n, digest_size=32).digest()) for n in range(count)]
        parents = [None, *keys]
        self._blocks = [
            StoredBlock(key, _touched(nbytes), parent)
            for key, parent in zip(keys, parents, strict=False)
        ]
        self._into = [_touched(nbytes) for _ in keys]
        self._client: Any = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
        whole = bytes(self._total)
        self._client.put_object(Bucket=_BUCKET, Key="whole", Body=whole)
        for number in range(count):
            self._client.put_object(Bucket=_BUCKET, Key=f"block{number}", Body=bytes(nbytes))
        self._whole = whole

    async def run(self, repeats: int) -> dict[str, list[float]]:
        """Seconds of each way, once a round."""
        seconds: defaultdict[str, list[float]] = defaultdict(list)
        bare, checked = self._store(), open_backend(self._store())
        await bare.open([self._layout])
        await checked.open([self._layout])
        for _ in range(repeats + 1):
            await self._ours(seconds, "", bare)
            await self._ours(seconds, ", checked", checked)
            for name, way in self._others().items():
                seconds[name].append(_timed(way))
        await bare.close()
        await checked.close()
        self._client.close()
        return {name: times[1:] for name, times in seconds.items()}  # the first one connects

    def _store(self) -> S3Backend:
        return S3Backend(
            S3Settings(
                bucket=_BUCKET,
                endpoint_url=self._endpoint,
                blocks_per_object=len(self._blocks),
                sign_payload=False,
            )
        )

    async def _ours(self, seconds: dict[str, list[float]], what: str, store: Backend) -> None:
        keys = [block.key for block in self._blocks]
        await store.delete(keys)
        start = time.perf_counter()
        saved = await store.save(self._blocks)
        middle = time.perf_counter()
        loaded = await store.load(keys, self._into)
        end = time.perf_counter()
        if (saved, loaded) != (len(keys), len(keys)):
            raise RuntimeError(f"{saved} of {len(keys)} blocks were saved, {loaded} loaded")
        seconds["PUT" + what].append(middle - start)
        seconds["GET" + what].append(end - middle)

    def _ordinary(self, name: str) -> bytes:
        data: bytes = self._client.get_object(Bucket=_BUCKET, Key=name)["Body"].read()
        return data

    def _others(self) -> dict[str, Callable[[], object]]:
        return {
            "GET, ordinary, one object": lambda: self._ordinary("whole"),
            "GET, ordinary, each block": lambda: [
                self._ordinary(f"block{number}") for number in range(len(self._blocks))
            ],
            "GET, raw socket": lambda: raw_get_seconds(self._endpoint, "whole", self._into),
            "PUT, ordinary, one object": lambda: self._client.put_object(
                Bucket=_BUCKET, Key="other", Body=self._whole
            ),
            "PUT, raw socket": lambda: raw_put_seconds(self._endpoint, "other", self._into),
        }


def raw_get_seconds(endpoint: str, name: str, into: list[Tensor]) -> float:
    """Seconds to read one object into `into`, by hand, on a new connection. Blocks."""
    views = [buffer.numpy().data for buffer in into]
    start = time.perf_counter()
    with _connected(endpoint) as server:
        server.sendall(f"GET /{_BUCKET}/{name} HTTP/1.1\r\n\r\n".encode())
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += server.recv(1)
        for view in views:
            at = 0
            while at < len(view):
                at += server.recv_into(view[at:])
    return time.perf_counter() - start


def raw_put_seconds(endpoint: str, name: str, data: list[Tensor]) -> float:
    """Seconds to write one object of all `data`, by hand, on a new connection. Blocks."""
    views = [buffer.numpy().data for buffer in data]
    start = time.perf_counter()
    with _connected(endpoint) as server:
        nbytes = sum(len(view) for view in views)
        head = f"PUT /{_BUCKET}/{name} HTTP/1.1\r\nContent-Length: {nbytes}\r\n\r\n"
        server.sendall(head.encode())
        for view in views:
            server.sendall(view)
        server.recv(4096)
    return time.perf_counter() - start


@contextmanager
def _connected(endpoint: str) -> Iterator[socket.socket]:
    parts = urlsplit(endpoint)
    with socket.create_connection((parts.hostname or "", parts.port or 80)) as server:
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield server


@contextmanager
def _credentials() -> Iterator[None]:
    names = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _touched(nbytes: int) -> Tensor:
    return torch.full((nbytes,), 1, dtype=torch.uint8)


def _timed(way: Callable[[], object]) -> float:
    start = time.perf_counter()
    way()
    return time.perf_counter() - start


def main() -> None:
    """Measure groups of small, usual and large blocks."""
    for block_nbytes, count in [(256 << 10, 8), (2 << 20, 1), (2 << 20, 8), (32 << 20, 1)]:
        title = f"S3, {count} blocks of {block_nbytes / 2**20:g} MiB"
        print(render(title, measure(block_nbytes, count)))


if __name__ == "__main__":
    main()
