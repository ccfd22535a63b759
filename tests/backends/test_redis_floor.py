"""What the Redis store's speed is compared with."""

from __future__ import annotations

import pytest

from kvconnect.bench.store_floor_redis import redis_floor


def test_floor_of_a_real_server_leaves_nothing_behind(redis_server):
    before = redis_server.admin.dbsize()
    floor = redis_floor("127.0.0.1", redis_server.port, value_nbytes=100_000, count=3, repeats=1)
    assert floor.nbytes == 300_000
    assert floor.set_seconds > 0
    assert floor.get_seconds > 0
    assert redis_server.admin.dbsize() == before


def test_floor_of_a_server_that_lets_nobody_in_says_so(redis_server):
    with pytest.raises(RuntimeError, match=r"WRONGPASS|AUTH"):
        redis_floor("127.0.0.1", redis_server.port, username="nobody", password="x")
