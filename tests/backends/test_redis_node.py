"""One server's connections: whatever becomes of those who use them, none is left open."""

from __future__ import annotations

import asyncio
import threading
from typing import get_args

import hiredis
import pytest
from redis_server import until

from kvconnect.backends import open_backend
from kvconnect.backends.redis import client as redis_client
from kvconnect.backends.redis.client import Kind, RedisNode
from kvconnect.backends.redis.commands import about
from kvconnect.backends.redis.router import RedisRouter
from kvconnect.backends.redis.settings import Address, RedisSettings
from kvconnect.errors import BackendUnavailable


@pytest.fixture
def node_of():
    """A node of a server that has no other clients than its own `admin`."""

    def make(server):
        address = Address("127.0.0.1", server.port)
        return RedisNode(address, RedisSettings((address,)))

    return make


def no_client_is_left(server):
    until(lambda: len(server.admin.client_list()) == 1, "the end of all but admin's connection")


async def held(node, event, kind="fetch"):
    """A job of `node` whose thread does not notice that its connection is ended; it has begun."""
    loop, begun = asyncio.get_running_loop(), asyncio.Event()

    def work(wire):
        loop.call_soon_threadsafe(begun.set)
        event.wait(60)

    running = asyncio.ensure_future(node.run(work, kind))
    await begun.wait()
    return running


def test_work_that_was_abandoned_before_it_had_a_connection_gets_none():
    hold = redis_client._Hold()
    hold.abort()
    with pytest.raises(BackendUnavailable, match="was abandoned"):
        hold.attach(None)


async def test_close_that_is_given_up_has_closed_what_is_idle(own_redis, node_of):
    node, go_on = node_of(own_redis), threading.Event()
    running = await held(node, go_on)
    await node.run(lambda wire: None, "fetch")  # its connection is idle now
    closing = asyncio.ensure_future(node.close())
    await asyncio.sleep(0)
    assert not closing.done()  # it waits for the thread
    closing.cancel()
    await asyncio.wait({closing})
    assert closing.cancelled()
    no_client_is_left(own_redis)
    go_on.set()
    await asyncio.wait({running})


async def test_work_that_ends_well_as_the_node_is_closed_leaves_no_connection(
    own_redis, node_of, monkeypatch
):
    monkeypatch.setattr(redis_client, "_JOIN_S", 0)
    node, ending, go_on = node_of(own_redis), threading.Event(), threading.Event()

    class Slow(list):
        def append(self, link):
            ending.set()
            go_on.wait(60)
            super().append(link)

    node._idle = Slow()
    running = asyncio.ensure_future(node.run(lambda wire: None, "fetch"))
    await asyncio.to_thread(ending.wait, 60)
    await node.close()
    go_on.set()
    await asyncio.wait({running})
    no_client_is_left(own_redis)


@pytest.mark.parametrize("kind", get_args(Kind))
async def test_work_of_one_kind_does_not_wait_behind_that_of_others(own_redis, node_of, kind):
    node, go_on = node_of(own_redis), threading.Event()
    others = [other for other in get_args(Kind) if other != kind]
    running = [await held(node, go_on, other) for other in others for _ in range(2)]
    async with asyncio.timeout(60):
        await node.run(lambda wire: None, kind)
    go_on.set()
    await asyncio.gather(*running)
    await node.close()


@pytest.mark.parametrize("connections", [1, 2])
async def test_wire_knows_whether_another_connection_fetches(own_redis, connections):
    address, go_on = Address("127.0.0.1", own_redis.port), threading.Event()
    node = RedisNode(address, RedisSettings((address,), connections=connections))
    running = [await held(node, go_on, "store")]
    assert await node.run(lambda wire: wire.alone(), "fetch")
    if connections == 2:
        running.append(await held(node, go_on, "fetch"))
        assert not await node.run(lambda wire: wire.alone(), "fetch")
        waiting = []
    else:  # what waits for the one connection does not use the server
        waiting = [node.run(lambda wire: wire.alone(), "fetch") for _ in range(3)]
    assert await asyncio.gather(*waiting) == [True] * len(waiting)
    go_on.set()
    await asyncio.gather(*running)
    await node.close()


async def test_close_of_a_store_that_is_given_up_at_once_leaves_no_connection(own_redis):
    store = open_backend(own_redis.url).inner
    await store.open([])
    closing = asyncio.ensure_future(store.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait({closing})
    no_client_is_left(own_redis)


async def test_an_error_among_answers_that_must_be_none_is_raised(monkeypatch):
    router = RedisRouter(RedisSettings((Address("127.0.0.1", 1),)))
    replies = [b"OK", hiredis.ReplyError("NOPERM this user has no permissions"), 1]

    async def ask(asks):
        return replies[: len(asks)]

    monkeypatch.setattr(router, "ask", ask)
    assert await router.answers([about(b"UNLINK", b"a")]) == [b"OK"]
    with pytest.raises(BackendUnavailable, match="NOPERM"):
        await router.answers([about(b"UNLINK", name) for name in (b"a", b"b", b"c")])
