"""After delete and scrub no byte of a block that is gone is in the medium: searched for there."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from dataclasses import replace
from zlib import crc32

import pytest
import redis
import torch

from kvconnect.backend import StoredBlock
from kvconnect.backends import open_backend
from kvconnect.errors import BackendUnavailable
from kvconnect.keys import Namespace

NBYTES = 40960


def a_block(kit, name, parent=None, *, nbytes=NBYTES, tenant="mine"):
    """A block whose bytes and tokens no other has."""
    first = 1000 * crc32(name.encode()) % (1 << 30)
    tokens = range(first, first + 4)
    one = kit.block(kit.key(name), parent, nbytes=nbytes, tokens=tokens)
    return replace(one, namespace=Namespace(tenant).tag())


def a_chain(kit, name, count, **options) -> list[StoredBlock]:
    made: list[StoredBlock] = []
    for number in range(count):
        parent = made[-1].key if made else kit.key(name, "root")
        made.append(a_block(kit, f"{name} {number}", parent, **options))
    return made


def holds(medium: bytes, one: StoredBlock) -> bool:
    """Whether a page of its value, its key or its tokens are there."""
    value = bytes(one.data.numpy())
    pages = [value[start : start + 64] for start in range(0, len(value), 4096)]
    tokens = one.tokens.astype("<i4").tobytes()
    ids = (one.key, one.key.hex().encode(), tokens, b64encode(tokens))
    return any(piece in medium for piece in (*pages, *ids))


async def scrubbed(store) -> None:
    while await store.scrub():
        pass


def files(path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(path.iterdir()))


async def test_disk_free_slots_hold_nothing_of_blocks_that_were_dropped(make_disk, path, kit):
    kept = a_chain(kit, "kept", 3, tenant="yours")
    gone = a_chain(kit, "gone", 4)
    async with kit.opened(make_disk()) as store:
        await store.save(kept + gone)
        await store.delete([one.key for one in gone])  # as an engine drops damaged ones
        assert any(holds(files(path), one) for one in gone)
    async with kit.opened(make_disk(), "maintain") as store:
        await scrubbed(store)
        assert await store.lookup([one.key for one in kept]) == 3
    assert not any(holds(files(path), one) for one in gone)
    assert all(holds(files(path), one) for one in kept)


async def test_disk_the_end_of_a_longer_slot_holds_nothing(make_disk, path, kit):
    """A compressed value is a little shorter than its slot, where a longer one was."""
    gone = a_block(kit, "gone", nbytes=69632)
    kept = a_block(kit, "kept", nbytes=65536 + 100, tenant="yours")
    shorter = replace(kept, data=kept.data[: 65536 + 100])
    async with kit.opened(make_disk(capacity=1 << 20)) as store:
        assert await store.save([gone]) == 1
        await store.delete([gone.key])
        filler = [a_block(kit, f"filler {n}", nbytes=66000, tenant="yours") for n in range(12)]
        for one in filler:  # the slot is used again once the others are
            await store.save([one])
        await store.save([shorter])
    async with kit.opened(make_disk(capacity=1 << 20), "maintain") as store:
        await scrubbed(store)
    assert not holds(files(path), gone)
    async with kit.opened(make_disk(capacity=1 << 20)) as store:
        buffer = torch.zeros(len(shorter.data), dtype=torch.uint8)
        assert await store.load([shorter.key], [buffer]) == 1
        assert torch.equal(buffer, shorter.data)


async def test_disk_writers_go_on_meanwhile(make_disk, path, kit):
    async with kit.opened(make_disk()) as engine, kit.opened(make_disk(), "maintain") as store:
        await engine.save(a_chain(kit, "gone", 6))
        await engine.delete([one.key for one in a_chain(kit, "gone", 6)])
        more = [a_block(kit, f"more {n}") for n in range(12)]
        _, *saved = await asyncio.gather(scrubbed(store), *(engine.save([one]) for one in more))
        assert saved == [1] * 12
        for one in more:
            buffer = torch.zeros(NBYTES, dtype=torch.uint8)
            assert await engine.load([one.key], [buffer]) == 1
            assert torch.equal(buffer, one.data)


async def test_disk_a_pass_ends_beside_a_writer(make_disk, kit):
    """A block that is stored meanwhile does not prolong it."""
    async with kit.opened(make_disk()) as engine, kit.opened(make_disk(), "maintain") as store:
        for number in range(20):
            one = a_block(kit, f"short {number}", nbytes=69632)
            await engine.save([replace(one, data=one.data[: 65536 + 100])])
            if not await store.scrub():
                break
        else:
            pytest.fail("it goes on as long as blocks are stored")


@pytest.mark.parametrize("make_bare", ["memory"], indirect=True)
async def test_memory_that_is_free_holds_nothing(make_bare, kit):
    kept, gone = a_chain(kit, "kept", 3, tenant="yours"), a_chain(kit, "gone", 4)
    async with kit.opened(make_bare(capacity=1 << 20)) as store:
        await store.save([*gone, *kept])
        await store.delete([one.key for one in gone])
        region = store._opened().region.tensor.numpy()
        value = [bytes(one.data[:64].numpy()) for one in gone]
        assert all(one in bytes(region) for one in value)
        await scrubbed(store)
        assert not any(one in bytes(region) for one in value)
        assert await store.lookup([one.key for one in kept]) == 3


@pytest.mark.parametrize("command", ["getrange", "zrem", "unlink", "zrange", "pttl"])
async def test_redis_refused_replies_are_errors_and_remove_nothing(command, own_redis, kit):
    """An error is no answer that a block is gone."""
    client = own_redis.admin
    kept = [*a_chain(kit, "kept", 2), a_block(kit, "in parts", nbytes=5 << 20)]
    gone = [a_block(kit, "gone"), a_block(kit, "gone in parts", nbytes=5 << 20)]
    store = open_backend(f"{own_redis.url}?prefix=scrub:").inner
    async with kit.opened(store):
        assert await store.save(kept + gone) == 5
        client.delete(*(f"scrub:b:{one.key.hex()}" for one in gone))
        names = own_redis.names("scrub:")
        members = client.zrange(f"scrub:c:{kept[0].parent.hex()}", 0, -1)
        client.execute_command("ACL", "SETUSER", "default", f"-{command}")
        with pytest.raises(BackendUnavailable, match="NOPERM"):
            await scrubbed(store)
        client.execute_command("ACL", "SETUSER", "default", f"+{command}")
        assert set(names) >= set(own_redis.names("scrub:"))
        assert client.zrange(f"scrub:c:{kept[0].parent.hex()}", 0, -1) == members
        await scrubbed(store)
        assert await store.lookup([one.key for one in kept]) == 3
        left = in_redis(client)
        assert not any(holds(left, one) for one in gone)


def in_redis(client) -> bytes:
    found = []
    for name in client.scan_iter(count=1000):
        kind = client.type(name)
        found += [name, *(client.zrange(name, 0, -1) if kind == b"zset" else [client.get(name)])]
    return b"\n".join(found)


@pytest.mark.parametrize("dropped", ["by name", "by the server"])
async def test_redis_holds_no_key_of_a_tenant(dropped, redis_server, kit):
    client = redis.Redis.from_url(redis_server.url)
    client.flushdb()
    kept = a_chain(kit, "kept", 3, tenant="yours")
    gone = [*a_chain(kit, "gone", 3), a_block(kit, "in parts", nbytes=5 << 20)]
    store = open_backend(f"{redis_server.url}?prefix=scrub:").inner
    async with kit.opened(store):
        assert await store.save(kept + gone) == 7
        keys = [one.key for one in gone]
        if dropped == "by name":
            await store.delete(keys)
        else:
            client.delete(*(f"scrub:b:{key.hex()}" for key in keys))
        left = any(holds(in_redis(client), one) for one in gone)
        assert left == (dropped == "by the server")
        await scrubbed(store)
        left = in_redis(client)
        assert not any(holds(left, one) for one in gone)
        assert await store.lookup([one.key for one in kept]) == 3
        assert len(await store.children(kept[0].parent)) == 1
    client.close()


async def test_redis_parts_that_are_being_written_stay(redis_server, kit):
    client = redis.Redis.from_url(redis_server.url)
    client.flushdb()
    name = f"scrub:p:{kit.key('a').hex()}:{'00' * 8}:1"
    client.set(name, b"x", px=600_000)
    store = open_backend(f"{redis_server.url}?prefix=scrub:").inner
    async with kit.opened(store):
        await scrubbed(store)
        assert client.exists(name)
        client.persist(name)
        await scrubbed(store)
        assert not client.exists(name)
    client.close()


async def test_redis_a_block_that_is_completed_meanwhile_stays(redis_server, kit, monkeypatch):
    client = redis.Redis.from_url(redis_server.url)
    client.flushdb()
    store = open_backend(f"{redis_server.url}?prefix=scrub:").inner
    async with kit.opened(store):
        one = a_block(kit, "in parts", nbytes=5 << 20)
        assert await store.save([one]) == 1
        head, parts = f"scrub:b:{one.key.hex()}", client.keys("scrub:p:*")
        content = client.get(head)
        client.delete(head, *client.keys("scrub:c:*"))
        for name in parts:
            client.pexpire(name, 600_000)
        router = store._opened().router
        look = router.look

        async def look_and_complete(asks):
            found = await look(asks)
            if any(ask.name in {head.encode(), *parts} for ask in asks):
                client.set(head, content)
                for name in parts:
                    client.persist(name)
            return found

        monkeypatch.setattr(router, "look", look_and_complete)
        await scrubbed(store)
        assert client.keys("scrub:p:*") == parts
        assert await store.lookup([one.key]) == 1
    client.close()


async def test_s3_holds_no_object_of_a_tenant(make_s3, s3_server, kit):
    kept, gone = a_chain(kit, "kept", 3, tenant="yours"), a_chain(kit, "gone", 11)
    async with kit.opened(make_s3()) as store:
        assert await store.save(kept + gone) == 14
        await store.delete([one.key for one in gone])
        await scrubbed(store)
        assert await store.lookup([one.key for one in kept]) == 3
    medium = b"".join(name.encode() + content for name, (content, *_) in s3_server.objects.items())
    assert not any(holds(medium, one) for one in gone)
    assert all(holds(medium, one) for one in kept)
