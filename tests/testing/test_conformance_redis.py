"""``redis:`` keeps the contract, on a real server and on a real cluster of three."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import ClassVar

import pytest
from redis_server import RedisServer, redis_cluster  # noqa: F401 - a fixture

from kvconnect.backends import open_backend
from kvconnect.testing import Address, BackendConformance


class TestRedis(BackendConformance):
    ttl_s = 1.0
    ends_cancelled = True

    @pytest.fixture(autouse=True)
    def server(self, tmp_path: Path):
        self._server = RedisServer(tmp_path / "redis", "--save", "3600 1").start()
        self.address = Address("127.0.0.1", self._server.port)
        yield
        self._server.stop()

    def make_backend(self):
        return self.make_via(self.address)

    def make_via(self, address, query=""):
        return open_backend(f"redis://{address.host}:{address.port}{query}").inner

    def make_expiring(self, ttl_s):
        return self.make_via(self.address, f"?ttl={ttl_s}s")

    async def pass_time(self, clock, seconds):
        await asyncio.sleep(seconds)  # the server keeps it

    async def restart_server(self, *, empty):
        if not empty:
            self._server.admin.save()
        else:
            (self._server.folder / "dump.rdb").unlink(missing_ok=True)
        self._server.stop()
        self._server.start()


class TestRedisCluster(BackendConformance):
    ends_cancelled = True
    skip: ClassVar = {
        "faults": "shown on one server",
        "model": "shown on one server",
        "end to end": "shown on one server",
        "integrity": "shown on one server",
    }

    @pytest.fixture(autouse=True)
    def cluster(self, redis_cluster, tmp_path):  # noqa: F811
        self.url = f"{redis_cluster.url}?prefix={tmp_path.name}:"

    def make_backend(self):
        return open_backend(self.url).inner
