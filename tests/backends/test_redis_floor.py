"""What the Redis store's speed is compared with."""

from __future__ import annotations

import pytest

from kvconnect.bench.store.payloads import Payloads
from kvconnect_bench.store.floor_redis import RedisFloor


def test_floor_moves_the_values_and_leaves_nothing_behind(redis_server):
    before = redis_server.admin.dbsize()
    payloads = Payloads(64 << 10, 3)
    floor = RedisFloor(payloads, f"redis://127.0.0.1:{redis_server.port}")
    assert min(floor.put()) > 0
    assert redis_server.admin.dbsize() == before + 3
    payloads.spoil()
    assert min(floor.get()) > 0
    payloads.check()
    assert floor.lookup(7) > 0
    floor.close()
    assert redis_server.admin.dbsize() == before


def test_floor_of_a_server_that_lets_nobody_in_says_so(redis_server):
    with pytest.raises(RuntimeError, match=r"WRONGPASS|AUTH"):
        RedisFloor(Payloads(64 << 10, 1), f"redis://nobody:x@127.0.0.1:{redis_server.port}")
