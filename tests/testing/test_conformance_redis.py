"""``redis:`` keeps the contract, on a real server and on a real cluster of three."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import pytest
from redis_server import RedisServer, redis_cluster  # noqa: F401 - a fixture

from kvconnect.backends import open_backend
from kvconnect.backends.guard import breaker
from kvconnect.testing import Address, BackendConformance


@pytest.fixture(scope="module")
def one_server(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"), "--save", "3600 1").start()
    yield server
    server.stop()


class TestRedis(BackendConformance):
    ttl_s = 0.5
    deadline_s = 0.4
    ends_cancelled = True

    @pytest.fixture(autouse=True)
    def server(self, one_server, monkeypatch):
        monkeypatch.setattr(breaker, "_FIRST_PAUSE_S", 0.1)  # how soon: backends/test_breaker.py
        one_server.admin.flushall()
        self._server = one_server
        self._restarted = False
        self.address = Address("127.0.0.1", one_server.port)
        yield
        if self._restarted:  # on the thread of the check, with which the process ends
            one_server.stop()
            one_server.start()

    def make_backend(self):
        return self.make_via(self.address)

    def make_via(self, address, query=""):
        return open_backend(f"redis://{address.host}:{address.port}{query}").inner

    def make_expiring(self, ttl_s):
        return self.make_via(self.address, f"?ttl={ttl_s}s")

    async def pass_time(self, clock, seconds):
        await asyncio.sleep(seconds)  # the server keeps it

    async def restart_server(self, *, empty):
        self._restarted = True
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
