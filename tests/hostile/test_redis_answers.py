"""A real Redis server's answers, changed on their way."""

from __future__ import annotations

import pytest
from mutations import mutator
from redis_faults import Relay
from workload import Workload

from kvconnect.backends import open_backend

FORM = [pytest.param(10, id="quick"), pytest.param(200, id="long", marks=pytest.mark.slow)]
TOKENS = [
    b"\r\n",
    b"$-1\r\n",
    b"$5\r\nhello\r\n",
    b"$99999999999999999999\r\n",
    b"$4294967296\r\n",
    b":1\r\n",
    b":-9223372036854775808\r\n",
    b"*-1\r\n",
    b"*1000000000\r\n",
    b"*2\r\n" * 50,
    b"+OK\r\n",
    b"-ERR no\r\n",
    b"-MOVED 1 127.0.0.1:1\r\n",
    b"-ASK 1 127.0.0.1:1\r\n",
    b"-OOM no\r\n",
    b"-WRONGTYPE no\r\n",
    b"-LOADING\r\n",
    b"%2\r\n",
    b"_\r\n",
    b"HTTP/1.1 200 OK\r\n\r\n",
]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tries", FORM)
async def test_answers_that_are_changed_cost_blocks_and_nothing_else(own_redis, tries):
    relay = Relay(own_redis.port)

    def make(deadline_s):
        url = f"redis://127.0.0.1:{relay.port}?timeout={deadline_s / 2}s"
        return open_backend(url, deadline_s=deadline_s)

    work = Workload("Redis answers changed on their way", make)
    try:
        for chance in work.tries(tries):
            unchanged = 100 * chance.randrange(6)  # or few stores would ever be open
            relay.change = mutator(chance, TOKENS, work.counts, unchanged=unchanged)
            await work.suffer(chance)
            relay.change = lambda data, _: data
            await work.expect_recovery()
    finally:
        relay.close()
