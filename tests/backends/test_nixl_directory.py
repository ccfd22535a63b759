"""``nixl:?directory=``: instances find each other in a Redis."""

from __future__ import annotations

import asyncio
import time

import pytest
from nixl_peer import NixlPeer, eventually
from redis_server import free_port

from kvconnect.backends import open_backend
from kvconnect.backends.nixl import directory
from kvconnect.errors import BackendUnavailable, ConfigurationError
from kvconnect.transfer import peers


def url_of(redis, prefix: str) -> str:
    place = f"directory={redis.url}&prefix={prefix}:"
    return f"nixl://?transport=tcp&patience=60s&verify=full&{place}"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(directory, "_REFRESH_S", 0.05)


async def test_instances_of_one_url_find_each_other(kit, redis_server):
    url = url_of(redis_server, "find")
    far = NixlPeer(url)
    try:
        async with kit.opened(open_backend(url)) as near:
            keys = kit.keys("directory", count=3)
            far.save(kit.chain(keys))

            async def found():
                return await near.inner.lookup(keys) == 3

            await eventually(found)
            into = kit.buffers(3)
            assert await near.inner.load(keys, into) == 3
            assert all(map(kit.holds, into, keys))
            assert redis_server.admin.zcard("find:peers") == 2
        assert redis_server.admin.zrange("find:peers", 0, -1) == [far.address.encode()]
        other = open_backend(url_of(redis_server, "another"))
        async with kit.opened(other):
            assert (await other.stats())["peers"] == 0
    finally:
        far.end()


async def test_an_instance_that_is_killed_is_left_out(kit, redis_server, monkeypatch):
    url = url_of(redis_server, "killed")
    now = time.time()
    redis_server.admin.zadd("killed:peers", {"127.0.0.1:1": now + 0.3})
    async with kit.opened(open_backend(url)) as near:
        found = near.inner._parts.node.peers
        assert list(found.links()) == ["127.0.0.1:1"]

        async def left_out():
            return not found.links()

        await eventually(left_out)


async def test_while_the_directory_is_gone_the_peers_stay(kit, own_redis):
    url = url_of(own_redis, "gone")
    async with (
        kit.opened(open_backend(url)) as far,
        kit.opened(open_backend(url)) as near,
    ):
        keys = kit.keys("gone", count=3)
        await far.inner.save(kit.chain(keys))

        async def found():
            return await near.inner.lookup(keys) == 3

        await eventually(found)
        own_redis.stop()
        await asyncio.sleep(0.3)  # so that it is asked, and does not answer
        assert await near.inner.lookup(keys) == 3


async def test_a_directory_that_is_not_there_is_an_error_at_the_start(kit):
    store = open_backend(
        f"nixl://?transport=tcp&directory=redis://:secret-word@127.0.0.1:{free_port()}"
    )
    with pytest.raises(BackendUnavailable, match=r"directory redis://:\*\*\*@127") as caught:
        await store.open([kit.layout])
    assert "secret-word" not in str(caught.value)
    await store.close()


async def test_a_directory_that_refuses_is_an_error_at_the_start(kit, redis_server):
    url = url_of(redis_server, "refuses").replace("redis://", "redis://:wrong-word@")
    with redis_server.configured(requirepass="secret"):
        redis_server.admin.connection_pool.connection_kwargs["password"] = "secret"
        store = open_backend(url)
        try:
            with pytest.raises(ConfigurationError, match="directory=") as caught:
                await store.open([kit.layout])
        finally:
            redis_server.admin.config_set("requirepass", "")
    assert "wrong-word" not in str(caught.value)
    await store.close()


async def test_what_others_write_into_it_is_no_more_than_an_address(kit, redis_server):
    wrong = [b"\xff\xfe", b"nonsense", b"host:99999", b"127.0.0.1:0", b"x" * 400 + b":1", b""]
    redis_server.admin.zadd("odd:peers", dict.fromkeys(wrong, time.time() + 60))
    async with kit.opened(open_backend(url_of(redis_server, "odd"))) as near:
        assert near.inner._parts.node.peers.links() == {}


async def test_entries_that_are_of_no_use_keep_no_newcomer_out(kit, redis_server, monkeypatch):
    monkeypatch.setattr(peers, "_MAX_LINKS", 4)
    url = url_of(redis_server, "starved")
    dead = {f"127.0.0.1:{port}": time.time() + 1000 for port in range(1, 9)}
    redis_server.admin.zadd("starved:peers", dead)
    async with kit.opened(open_backend(url)) as near:
        assert len(near.inner._parts.node.peers.links()) == 4
        far = NixlPeer(url)
        try:
            keys = kit.keys("newcomer", count=3)
            far.save(kit.chain(keys))

            async def found():
                return await near.inner.lookup(keys) == 3

            await eventually(found)

            async def still_bounded():
                return len(near.inner._parts.node.peers.links()) == 4

            await eventually(still_bounded)
        finally:
            far.end()
