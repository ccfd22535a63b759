"""What a Redis store knows of its blocks, that asking for it is no use, and who passes it on."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest
from redis_faults import Script

from kvconnect.backends import open_backend
from kvconnect.errors import BackendUnavailable

PARTED = (5 << 20) + 17  # of several values


@pytest.fixture
def url(redis_server, prefix):
    return f"{redis_server.url}?prefix={prefix}"


@pytest.fixture
def opened(kit):
    """Opens the store of a URL."""
    return lambda url: kit.opened(open_backend(url, raw=True))


@pytest.mark.parametrize("nbytes", [100, PARTED])
@pytest.mark.parametrize("tokens", [5, 2000])  # those are more than what is read at first
async def test_describe_tells_all_that_was_saved(kit, url, nbytes, tokens, opened):
    key, parent = kit.keys("known", nbytes, tokens, count=2)
    told = {"priority": 71, "namespace": b"n" * 32, "model": b"m" * 32, "group": 3}
    before = time.time()
    async with opened(url) as store:
        block = kit.block(key, parent, nbytes=nbytes, tokens=range(tokens))
        await store.save([replace(block, **told)])
        described = await store.describe([kit.key("absent"), key, kit.key("absent"), key])
        scanned = [entry async for entry in store.scan()]
    assert described[0] is described[2] is None
    for entry in (described[1], described[3], *scanned):
        assert (entry.key, entry.parent, entry.nbytes) == (key, parent, nbytes)
        assert {name: getattr(entry, name) for name in told} == told
        assert entry.tokens.tolist() == list(range(tokens))
        assert before - 1 <= entry.created_at <= time.time() + 1
        assert before - 2 <= entry.used_at <= time.time() + 1


@pytest.mark.parametrize(("ttl", "own_s"), [("1h", 60), ("60s", 3600)])
@pytest.mark.parametrize("nbytes", [100, PARTED])
async def test_the_shorter_of_two_times_counts(
    kit, url, redis_server, prefix, opened, ttl, own_s, nbytes
):
    key = kit.key("short", ttl, nbytes)
    async with opened(f"{url}&ttl={ttl}") as store:
        block = kit.block(key, nbytes=nbytes)
        await store.save([replace(block, expires_at=time.time() + own_s)])
    assert 50 < redis_server.admin.ttl(f"{prefix}b:{key.hex()}") <= 60


async def test_parts_of_a_block_that_does_not_expire_do_not_expire(
    kit, url, redis_server, prefix, opened
):
    key = kit.key("kept")
    async with opened(url) as store:
        await store.save([kit.block(key, nbytes=PARTED)])
    names = list(redis_server.admin.scan_iter(f"{prefix}*{key.hex()}*"))
    assert len(names) > 1
    assert {redis_server.admin.ttl(name) for name in names} == {-1}


async def test_describe_knows_nothing_of_junk(kit, url, redis_server, prefix, opened):
    keys = kit.keys("junk", count=3)
    async with opened(url) as store:
        await store.save([kit.block(key, nbytes=9) for key in keys])
        redis_server.admin.setrange(f"{prefix}b:{keys[0].hex()}", 0, "junk")
        redis_server.admin.delete(f"{prefix}b:{keys[1].hex()}")
        redis_server.admin.lpush(f"{prefix}b:{keys[1].hex()}", "another kind")
        described = await store.describe(keys)
        assert [entry and entry.key for entry in described] == [None, None, keys[2]]
        assert [entry.key async for entry in store.scan()] == [keys[2]]


async def test_listing_tells_the_last_use_and_is_none(kit, url, redis_server, prefix, opened):
    key = kit.key("idle")
    async with opened(url) as store:
        await store.save([kit.block(key, nbytes=100)])
        name = f"{prefix}b:{key.hex()}"
        dumped = redis_server.admin.dump(name)
        redis_server.admin.restore(name, 0, dumped, replace=True, idletime=1000)
        for _ in range(2 if leaves_no_trace(redis_server.admin) else 1):
            (entry,) = [entry async for entry in store.scan()]
            assert 999 <= time.time() - entry.used_at <= 1010
            redis_server.admin.restore(name, 0, dumped, replace=True, idletime=1000)
            (entry,) = await store.describe([key])
            assert 999 <= time.time() - entry.used_at <= 1010
        assert await store.lookup([key]) == 1
        assert redis_server.admin.object("idletime", name) < 10


def leaves_no_trace(admin):
    """Whether the server can be read from without that counting as use."""
    about = admin.info("server")
    version = about.get("valkey_version", about["redis_version"])
    return tuple(map(int, version.split(".")[:2])) >= (7, 2)


# ------------------------------------------------------------------------- what stands in the way


@pytest.mark.parametrize("junk", ["string", "list", "hash"])
async def test_index_of_tails_of_another_type_is_dropped_and_rebuilt(
    kit, url, redis_server, junk, opened
):
    parent, tail = kit.keys("index", count=2)
    blocks = [kit.block(parent), kit.block(tail, parent, tokens=[1, 2])]
    async with opened(url) as store:
        await store.save(blocks)
        name = store.inner._opened().router.names.children(parent)
        redis_server.admin.delete(name)
        plant = {
            "string": lambda: redis_server.admin.set(name, b"junk"),
            "list": lambda: redis_server.admin.rpush(name, b"junk"),
            "hash": lambda: redis_server.admin.hset(name, b"junk", b"junk"),
        }[junk]
        plant()
        assert await store.children(parent) == []
        assert await store.lookup([parent, tail]) == 2
        plant()
        assert await store.save(blocks) == 2
        assert [child.key for child in await store.children(parent)] == [tail]


async def test_listing_without_end_ends(kit, url, redis_server, prefix, monkeypatch, opened):
    """What fills pages and is no block is passed over, but not for ever."""
    async with opened(url) as store:
        redis_server.admin.mset({f"{prefix}b:junk{number}": b"" for number in range(5000)})
        assert [entry async for entry in store.scan()] == []
        monkeypatch.setattr("kvconnect.backends.redis.find._MOST_BARREN_S", 0.0)
        with pytest.raises(BackendUnavailable, match="its listing does not end"):
            _ = [entry async for entry in store.scan()]
        await store.save([kit.block(kit.key("one"))])


@pytest.fixture
def scripted():
    """Gives the URL of a server that answers SCAN as told, and lists how often it was asked."""
    asked, servers = [], []

    def make(scan):
        def answer(words):
            if words[0] == b"SCAN":
                asked.append(words)
                return scan()
            return b"+PONG\r\n" if words[0] == b"PING" else b"$0\r\n\r\n"

        servers.append(Script(answer))
        return f"redis://127.0.0.1:{servers[0].port}?prefix=p:", asked

    yield make
    servers[0].close()


@pytest.mark.parametrize("lists_one_key", [False, True])
async def test_listing_whose_cursor_comes_again_ends_at_once(scripted, lists_one_key, opened):
    """Also where each page has a key, if it was listed before."""
    key = b"p:b:" + bytes(range(32))
    page = b"*1\r\n$%d\r\n%s\r\n" % (len(key), key) if lists_one_key else b"*0\r\n"
    cursors = itertools.cycle([b"5", b"6", b"7"])
    url, asked = scripted(lambda: b"*2\r\n$1\r\n%s\r\n%s" % (next(cursors), page))
    async with opened(url) as store:
        with pytest.raises(BackendUnavailable, match="its listing does not end"):
            _ = [entry async for entry in store.scan()]
    assert len(asked) <= 5


async def test_survey_of_a_server_that_lists_nothing_for_ever_ends(scripted, monkeypatch, opened):
    monkeypatch.setattr("kvconnect.backends.redis.server._MOST_EMPTY_PAGES", 50)
    url, _ = scripted(lambda: b"*2\r\n$1\r\n7\r\n*0\r\n")
    async with opened(url) as store:
        with pytest.raises(BackendUnavailable, match="its listing does not end"):
            await store.stats()
