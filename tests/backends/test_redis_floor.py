"""What the Redis store's speed is compared with."""

from __future__ import annotations

import pytest

from kvconnect.bench.store.floor_redis import RawRedis


def test_floor_moves_the_values_and_leaves_nothing_behind(redis_server):
    before = redis_server.admin.dbsize()
    sources = [memoryview(bytes([number]) * 100_000) for number in range(3)]
    into = [memoryview(bytearray(100_000)) for _ in sources]
    floor = RawRedis("127.0.0.1", redis_server.port, sources, into)
    assert floor.put() > 0
    assert redis_server.admin.dbsize() == before + 3
    assert floor.get() > 0
    assert into == sources
    assert floor.lookup(7) > 0
    floor.close()
    assert redis_server.admin.dbsize() == before


def test_floor_of_a_server_that_lets_nobody_in_says_so(redis_server):
    with pytest.raises(RuntimeError, match=r"WRONGPASS|AUTH"):
        RawRedis("127.0.0.1", redis_server.port, [], [], username="nobody", password="x")
