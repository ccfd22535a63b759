"""One server's connections: whatever becomes of those who use them, none is left open."""

from __future__ import annotations

import asyncio
import threading

import pytest
from redis_server import until

from kvconnect.backends import open_backend, redis_node
from kvconnect.backends.redis_node import RedisNode
from kvconnect.backends.redis_settings import Address, RedisSettings


@pytest.fixture
def node_of():
    """A node of a server that has no other clients than its own `admin`."""

    def make(server):
        address = Address("127.0.0.1", server.port)
        return RedisNode(address, RedisSettings((address,)))

    return make


def no_client_is_left(server):
    until(lambda: len(server.admin.client_list()) == 1, "the end of all but admin's connection")


async def held(node, event):
    """A job of `node` whose thread does not notice that its connection is ended; it has begun."""
    loop, begun = asyncio.get_running_loop(), asyncio.Event()

    def work(wire):
        loop.call_soon_threadsafe(begun.set)
        event.wait(10)

    running = asyncio.ensure_future(node.run(work, moves_values=True))
    await begun.wait()
    return running


async def test_close_that_is_given_up_has_closed_what_is_idle(own_redis, node_of):
    node, go_on = node_of(own_redis), threading.Event()
    running = await held(node, go_on)
    await node.run(lambda wire: None, moves_values=True)  # its connection is idle now
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
    monkeypatch.setattr(redis_node, "_JOIN_S", 0)
    node, ending, go_on = node_of(own_redis), threading.Event(), threading.Event()

    class Slow(list):
        def append(self, link):
            ending.set()
            go_on.wait(10)
            super().append(link)

    node._idle = Slow()
    running = asyncio.ensure_future(node.run(lambda wire: None, moves_values=True))
    await asyncio.to_thread(ending.wait, 10)
    await node.close()
    go_on.set()
    await asyncio.wait({running})
    no_client_is_left(own_redis)


async def test_close_of_a_store_that_is_given_up_at_once_leaves_no_connection(own_redis):
    store = open_backend(own_redis.url).inner
    await store.open([])
    closing = asyncio.ensure_future(store.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait({closing})
    no_client_is_left(own_redis)
