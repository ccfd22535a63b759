"""Blocks in S3: several to an object, found in few requests, whatever other writers do."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

import pytest
from s3_server import BUCKET, moto_server, refusal

from kvconnect.backends import open_backend
from kvconnect.backends.s3.settings import S3Settings
from kvconnect.backends.s3.store import S3Backend
from kvconnect.errors import BackendUnavailable


@pytest.fixture
async def store(make_s3, kit):
    async with kit.opened(make_s3()) as backend:
        yield backend


async def loaded(backend, kit, keys):
    """How many leading `keys` can be loaded; fails if one is loaded wrong."""
    into = kit.buffers(len(keys))
    count = await backend.load(keys, into)
    assert all(kit.holds(b, key) for b, key in zip(into[:count], keys, strict=False))
    return count


@pytest.fixture(scope="module")
def moto():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "tester")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        with moto_server() as endpoint:
            yield endpoint


# ---------------------------------------------------------------------- against moto


@pytest.mark.parametrize("blocks_per_object", [1, 4])
async def test_moto_serves_what_another_store_saved(moto, s3_credentials, kit, blocks_per_object):
    url = (
        f"s3://{BUCKET}/fresh/{blocks_per_object}?endpoint_url={moto}&miss_ttl=0&lookup_ttl=0"
        f"&blocks_per_object={blocks_per_object}"
    )
    keys = kit.keys("moto", count=11)
    async with kit.opened(open_backend(url)) as first:
        assert await first.save(kit.chain(keys)) == 11
        assert await first.save(kit.chain(keys)) == 11
    async with kit.opened(open_backend(url)) as second:
        assert await second.lookup([*keys, kit.key("absent")]) == 11
        assert await loaded(second, kit, keys) == 11
        await second.delete([keys[5], keys[8]])
        assert await second.lookup(keys) == 5
        assert await kit.stored(second, keys[4:10]) == [True, False, True, True, False, True]
        assert sorted([entry.key async for entry in second.scan()]) == sorted(
            key for key in keys if key not in {keys[5], keys[8]}
        )
        assert await second.save(kit.chain(keys)) == 11
        assert (await second.stats())["blocks"] == 11
        await second.delete(keys)
        left = await second.stats()
        assert [left[name] for name in ("blocks", "bytes", "remembered", "abandoned")] == [0] * 4


async def test_moto_is_served_over_boto3s_connections_where_it_must_be(moto, s3_credentials, kit):
    # As behind a proxy that has TLS itself.
    store = S3Backend(S3Settings(bucket=BUCKET, prefix="plain", endpoint_url=moto, miss_ttl_s=0))
    keys = kit.keys("plain", count=5)
    with pytest.MonkeyPatch.context() as patch:
        proxies = {"http": "https://proxy"}
        patch.setattr("kvconnect.backends.s3.client.get_environ_proxies", lambda _: proxies)
        await store.open([])
    assert store._parts.bucket.client.transport is None
    assert await store.save(kit.chain(keys)) == 5
    assert await loaded(store, kit, [*keys]) == 5
    assert await store.load([kit.key("absent")], kit.buffers(1)) == 0
    await store.delete(keys)
    assert await store.lookup(keys) == 0
    await store.close()


# ---------------------------------------------------------------------- finding


@pytest.mark.parametrize("prefix", ["", "with space/é+%~", "x" * 200])
async def test_any_prefix_is_signed_right(make_s3, kit, prefix):
    keys = kit.keys("prefix", count=3)
    async with kit.opened(make_s3(prefix=prefix)) as store:
        assert await store.save(kit.chain(keys)) == 3
        assert await loaded(store, kit, keys) == 3
        assert (await store.stats())["blocks"] == 3
        assert len([entry async for entry in store.scan()]) == 3


async def test_everyday_requests_need_none_of_boto3s_machinery(store, kit, monkeypatch):
    def refuse(*_):
        raise AssertionError("boto3 was asked")

    monkeypatch.setattr("botocore.client.BaseClient._make_api_call", refuse)
    keys = kit.keys("quick", count=9)
    assert await store.lookup(keys) == 0
    assert await store.save(kit.chain(keys)) == 9
    assert await store.save(kit.chain(keys)[4:]) == 5
    assert await loaded(store, kit, keys) == 9


async def test_neighbours_share_an_object_and_are_read_in_one_request(store, kit, s3_server):
    keys = kit.keys("shared", count=16)
    await store.save(kit.chain(keys))
    assert len(s3_server.names("g")) == 2
    s3_server.counts()
    assert await loaded(store, kit, keys) == 16
    assert s3_server.counts() == {"GET k": 2, "GET g": 2}


async def test_block_that_is_alone_is_one_object(store, kit, s3_server):
    key = kit.key("alone")
    await store.save([kit.block(key)])
    assert len(s3_server.objects) == 1
    s3_server.counts()
    assert await loaded(store, kit, [key]) == 1
    assert s3_server.counts() == {"GET k": 2}


@pytest.mark.parametrize("offset", [0, 1, 5])
async def test_lookup_after_a_restart_asks_for_one_key_of_each_object(
    make_s3, kit, s3_server, offset
):
    # However the objects lie: of eight keys in a row, one is asked for.
    keys = kit.keys("restart", offset, count=offset + 40)
    async with kit.opened(make_s3()) as first:
        await first.save(kit.chain(keys[:offset]))
        await first.save(kit.chain(keys)[offset:])
    async with kit.opened(make_s3()) as second:
        s3_server.counts()
        assert await second.lookup(keys) == len(keys)
        assert s3_server.counts()["GET k"] <= -(-len(keys) // 8) + 2


async def test_long_prompt_that_is_not_stored_costs_few_requests(store, kit, s3_server):
    keys = kit.keys("long", count=2000)
    s3_server.counts()
    assert await store.lookup(keys) == 0
    assert s3_server.counts()["GET k"] <= 12


async def test_end_of_a_long_prompt_is_found_in_few_requests(make_s3, kit, s3_server):
    keys = kit.keys("end", count=1500)
    async with kit.opened(make_s3(blocks_per_object=64)) as first:
        await first.save([kit.block(key, nbytes=32) for key in keys[:700]])
    async with kit.opened(make_s3(blocks_per_object=16)) as second:
        s3_server.counts()
        assert await second.lookup(keys) == 700
        assert s3_server.counts()["GET k"] <= 11 + 1024 // 16 + 64


async def test_blocks_saved_one_by_one_are_found(make_s3, kit, s3_server):
    keys = kit.keys("decoded", count=30)
    async with kit.opened(make_s3()) as first:
        for block in kit.chain(keys):
            await first.save([block])
    async with kit.opened(make_s3()) as second:
        assert await second.lookup([*keys, kit.key("next")]) == 30
        assert await loaded(second, kit, keys) == 30


async def test_nothing_but_scan_and_stats_lists_the_bucket(store, kit, s3_server):
    keys = kit.keys("lists", count=12)
    blocks = [kit.block(k, p, tokens=[1]) for k, p in zip(keys, [None, *keys], strict=False)]
    s3_server.counts()
    await store.save(blocks)
    await store.lookup(keys)
    await loaded(store, kit, keys)
    await store.children(keys[-1])
    await store.delete(keys)
    assert "GET " not in s3_server.counts()


async def test_what_was_looked_up_is_remembered_for_its_time(make_s3, kit, s3_server):
    keys = kit.keys("remembered", count=20)
    async with kit.opened(make_s3()) as writer:
        await writer.save(kit.chain(keys))
    async with kit.opened(make_s3(lookup_ttl_s=60.0, miss_ttl_s=60.0)) as reader:
        assert await reader.lookup([*keys, kit.key("absent")]) == 20
        s3_server.counts()
        assert await reader.lookup([*keys, kit.key("absent")]) == 20
        assert await loaded(reader, kit, keys[8:16]) == 8
        assert s3_server.counts() == {"GET g": 1}


async def test_absence_is_remembered_for_a_short_time_only(make_s3, kit):
    key = kit.key("late")
    async with kit.opened(make_s3(miss_ttl_s=0.2)) as reader, kit.opened(make_s3()) as writer:
        assert await reader.lookup([key]) == 0
        await writer.save([kit.block(key)])
        deadline = time.monotonic() + 60
        while not await reader.lookup([key]):
            assert time.monotonic() < deadline


async def test_own_save_is_seen_at_once_whatever_is_remembered(make_s3, kit):
    keys = kit.keys("own", count=9)
    async with kit.opened(make_s3(lookup_ttl_s=60.0, miss_ttl_s=60.0)) as store:
        assert await store.lookup(keys) == 0
        await store.save(kit.chain(keys))
        assert await store.lookup(keys) == 9
        await store.delete(keys[3:4])
        assert await store.lookup(keys) == 3
        assert await kit.stored(store, keys) == [n != 3 for n in range(9)]


async def test_answer_that_was_on_its_way_during_a_delete_is_not_remembered(
    make_s3, kit, s3_server
):
    key = kit.key("overtaken")
    async with kit.opened(make_s3(lookup_ttl_s=60.0)) as reader, kit.opened(make_s3()) as writer:
        await writer.save([kit.block(key)])
        answered, go = threading.Event(), threading.Event()

        def late(request):
            if request.method != "GET" or answered.is_set():
                return None
            answer = s3_server._answer(request, b"")
            answered.set()
            go.wait(60)
            return answer

        s3_server.fault = late
        looking = asyncio.ensure_future(reader.lookup([key]))
        assert await asyncio.to_thread(answered.wait, 60)
        await reader.delete([key])
        go.set()
        assert await looking == 1
        assert await reader.lookup([key]) == 0


async def test_requests_for_one_prompt_at_the_same_time_are_asked_once(make_s3, kit, s3_server):
    keys = kit.keys("burst", count=8)
    async with kit.opened(make_s3(miss_ttl_s=60.0)) as store:
        s3_server.counts()
        assert await asyncio.gather(*(store.lookup(keys) for _ in range(20))) == [0] * 20
        assert s3_server.counts() == {"GET k": 1}


# ---------------------------------------------------------------------- what others do meanwhile


@pytest.mark.parametrize("cut", [False, True])
async def test_payload_that_is_gone_or_cut_is_forgotten_at_once_and_can_be_saved_again(
    make_s3, kit, s3_server, cut
):
    keys = kit.keys("gone", count=8)
    async with kit.opened(make_s3(lookup_ttl_s=60.0)) as store:
        await store.save(kit.chain(keys))
        (name,) = s3_server.names("g")
        data, *more = s3_server.objects.pop(name)
        if cut:
            s3_server.objects[name] = (data[: 3 * kit.frame_nbytes - 1], *more)
        assert await store.load(keys, kit.buffers(8)) == 0
        assert await store.lookup(keys) == 0
        assert not s3_server.names("k")  # nothing points to nowhere
        assert await store.save(kit.chain(keys)) == 8
        assert await loaded(store, kit, keys) == 8


async def test_overlapping_saves_of_two_stores_keep_every_block_once(make_s3, kit, s3_server):
    keys = kit.keys("overlap", count=12)
    blocks = kit.chain(keys)
    async with kit.opened(make_s3()) as one, kit.opened(make_s3()) as other:
        await one.save(blocks[2:6])
        # It finds the first one absent, and takes the others to be so, too.
        assert await other.save(blocks) == 12
        assert await loaded(one, kit, keys) == 12
        await one.delete(keys[3:4])
        for store in (one, other):
            assert await store.lookup(keys) == 3
            assert await kit.stored(store, keys) == [n != 3 for n in range(12)]
        await one.delete(keys)
        assert {name.split("/")[2] for name in s3_server.objects} <= {"c"}


async def test_writer_that_lost_every_block_leaves_nothing_behind(make_s3, kit, s3_server):
    keys = kit.keys("lost", count=4)
    async with kit.opened(make_s3()) as one, kit.opened(make_s3(miss_ttl_s=60.0)) as other:
        assert await other.lookup(keys) == 0
        await one.save(kit.chain(keys))
        before = dict(s3_server.objects)
        assert await other.save(kit.chain(keys)) == 4
        assert s3_server.objects == before
        assert await other.lookup(keys) == 4


async def test_writer_that_dies_between_payload_and_pointers_leaves_no_block(
    make_s3, kit, s3_server
):
    keys = kit.keys("died", count=8)
    async with kit.opened(make_s3()) as store:
        denied = refusal(403, "AccessDenied")
        s3_server.fault = lambda r: (
            denied if (r.method, r.kind) in {("PUT", "k"), ("DELETE", "g")} else None
        )
        with pytest.raises(BackendUnavailable):
            await store.save(kit.chain(keys))
        s3_server.fault = lambda _: None
        assert len(s3_server.names("g")) == 1
        assert await store.lookup(keys) == 0
        assert await store.save(kit.chain(keys)) == 8
        assert await loaded(store, kit, keys) == 8


# ---------------------------------------------------------------------- children, time, sizes


async def test_tails_are_found_without_listing(store, kit, s3_server):
    keys = kit.keys("tails", count=3)
    blocks = [
        kit.block(k, p, tokens=[n])
        for n, (k, p) in enumerate(zip(keys, [None, *keys[:2]], strict=True))
    ]
    await store.save(blocks)
    tails = kit.keys("tail", count=300)
    for start in range(0, 300, 100):
        await store.save(
            [kit.block(k, keys[1], tokens=[5, n]) for n, k in enumerate(tails[start : start + 100])]
        )
    s3_server.counts()
    found = await store.children(keys[1])
    assert s3_server.counts() == {"GET c": 1, "GET k": 1}
    # The block that follows in the same object, and of the tails those that came last.
    assert [child.key for child in found] == [keys[2], *tails[-256:]]
    assert found[-1].tokens.tolist() == [5, 99]


async def test_children_of_several_writers_at_once_are_all_listed(make_s3, kit):
    parent = kit.key("parent")
    stores = [make_s3() for _ in range(3)]
    for store in stores:
        await store.open([])
    saves = [
        store.save([kit.block(kit.key(number, n), parent, tokens=[number, n])])
        for number, store in enumerate(stores)
        for n in range(4)
    ]
    await asyncio.gather(*saves)
    assert len(await stores[0].children(parent)) == 12
    for store in stores:
        await store.close()


async def test_blocks_older_than_ttl_are_not_found_and_can_be_saved_again(make_s3, kit, s3_server):
    keys = kit.keys("old", count=4)
    async with kit.opened(make_s3(ttl_s=3600.0)) as store:
        await store.save([*kit.chain(keys[:3]), kit.block(keys[3], kit.key("x"))])
        # The service's clock counts, not this machine's.
        s3_server.ahead_s = 3599.0 - 10
        assert await store.lookup(keys) == 4
        s3_server.ahead_s = 3601.0
        assert await store.lookup(keys) == 0
        assert await kit.stored(store, keys) == [False] * 4
        assert await store.save(kit.chain(keys)) == 4
        assert await loaded(store, kit, keys) == 4


async def test_answer_that_is_remembered_ends_with_ttl(make_s3, kit):
    key = kit.key("expiring")
    async with kit.opened(make_s3(ttl_s=0.5, lookup_ttl_s=60.0)) as store:
        await store.save([kit.block(key)])
        deadline = time.monotonic() + 60
        while await store.lookup([key]):
            assert time.monotonic() < deadline


async def test_blocks_longer_than_a_part_come_back_whole(make_s3, kit, s3_server):
    keys = kit.keys("parts", count=3)
    async with kit.opened(make_s3(part_nbytes=64 << 10)) as store:
        sizes = [200_000, 1, 70_000]
        await store.save([kit.block(k, nbytes=n) for k, n in zip(keys, sizes, strict=True)])
        into = [kit.buffer(size) for size in sizes]
        s3_server.counts()
        assert await store.load(keys, into) == 3
        assert s3_server.counts()["GET g"] == 5
        assert all(kit.holds(b, k, framed=False) for b, k in zip(into, keys, strict=True))


async def test_pools_and_prompts_of_one_batch_do_not_share_objects(store, kit, s3_server):
    first, second = kit.keys("a", count=3), kit.keys("b", count=3)
    other = [replace(kit.block(kit.key("pool", n)), group=1) for n in range(2)]
    mixed = [kit.chain(first)[0], other[0], *kit.chain(first)[1:], other[1]]
    parents = [kit.key("root"), *second]
    mixed += [kit.block(k, p) for k, p in zip(second, parents, strict=False)]
    assert await store.save(mixed) == 8
    assert len(s3_server.names("g")) == 3


async def test_what_was_just_loaded_is_described_without_a_request(make_s3, kit, s3_server):
    keys = kit.keys("described", count=5)
    told = {"priority": 71, "namespace": b"n" * 32, "model": b"m" * 32, "group": 3}
    blocks = [
        replace(kit.block(key, parent, tokens=[7, -8]), **told)
        for key, parent in zip(keys, [None, *keys], strict=False)
    ]
    async with kit.opened(make_s3()) as store:
        await store.save(blocks)
    async with kit.opened(make_s3(lookup_ttl_s=60.0)) as store:
        assert await loaded(store, kit, keys) == 5
        s3_server.counts()
        entries = await store.describe(keys)
        assert not s3_server.counts()
        scanned = {entry.key: entry async for entry in store.scan()}
    async with kit.opened(make_s3()) as store:
        asked = await store.describe([kit.key("absent"), *keys])
    assert asked.pop(0) is None
    for entry, other, block in zip(entries, asked, blocks, strict=True):
        for known in (entry, other, scanned[block.key]):
            of = (known.key, known.nbytes, known.parent)
            assert of == (block.key, kit.frame_nbytes, block.parent)
            assert {name: getattr(known, name) for name in told} == told
            assert known.tokens.tolist() == [7, -8]
            assert abs(known.created_at - time.time()) < 60


async def test_upload_is_hashed_only_where_nothing_else_covers_it(make_s3, kit, s3_server):
    for option, hashed in [(None, True), (False, False), (True, True)]:
        async with kit.opened(make_s3(sign_payload=option, prefix=f"sign{option}")) as store:
            await store.save([kit.block(kit.key("sign"))])
            put = next(r for r in s3_server.requests if r.method == "PUT")
            assert (put.headers["x-amz-content-sha256"] != "UNSIGNED-PAYLOAD") == hashed
            s3_server.counts()
