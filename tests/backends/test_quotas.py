"""Quotas: who is above its share goes first, and who is below it loses nothing to others."""

from __future__ import annotations

import asyncio
import itertools
import json
import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from kvconnect.backends import open_backend
from kvconnect.backends.disk.eviction import Eviction
from kvconnect.backends.disk.format import connect
from kvconnect.backends.disk.store import DiskBackend
from kvconnect.backends.memory.store import MemoryBackend
from kvconnect.backends.quotas import Quotas, quotas_of, tenant_of
from kvconnect.backends.url import StoreUrl
from kvconnect.errors import ConfigurationError
from kvconnect.keys import Namespace, salt_tag
from kvconnect.testing import BlockMaker

SLOTS = 96
CAPACITY = SLOTS * BlockMaker().frame_nbytes


def space(name) -> bytes:
    return Namespace(str(name)).tag()


def tenant(name) -> bytes:
    return salt_tag(str(name))


@pytest.fixture(params=["memory", "disk"])
def make(request, tmp_path):
    def made(quotas: Quotas | None, capacity: int = CAPACITY):
        if request.param == "memory":
            return MemoryBackend(capacity, quotas=quotas)
        return DiskBackend(tmp_path / "kv", capacity=capacity, quotas=quotas)

    return made


def chain(kit, name, number, count=4, **options):
    keys = kit.keys(name, number, count=count)
    return [replace(one, namespace=space(name)) for one in kit.chain(keys, **options)]


async def press(store, kit, name, blocks, start=0, **options):
    for number in range(start, start + blocks // 4):
        await store.save(chain(kit, name, number, **options))


async def counts(store) -> Counter[bytes]:
    return Counter([tenant_of(entry.namespace) async for entry in store.scan()])


async def room(store) -> int:
    """The blocks that a full store holds."""
    return int((await store.stats())["blocks"])


async def test_a_flood_takes_nothing_from_who_is_below_its_share(make, kit):
    """Without quotas all of it is gone after one capacity of others' blocks of higher priority."""
    async with kit.opened(make(Quotas(0.25))) as store:
        mine = [one for number in range(4) for one in chain(kit, "mine", number, priority=1)]
        for start in range(0, len(mine), 4):
            assert await store.save(mine[start : start + 4]) == 4
        await press(store, kit, "flood", 5 * SLOTS, priority=99)
        assert [await store.lookup([one.key]) for one in mine] == [1] * 16
    # Not used for long, and still there: the flood had to live with the rest.


async def test_tenants_that_come_later_get_their_part_of_a_full_store(make, kit):
    """Without others, a tenant may have the whole store; those above their share give it back."""
    async with kit.opened(make(Quotas(0.5))) as store:
        for number, name in enumerate(("first", "second", "third"), 1):
            await press(store, kit, name, 2 * SLOTS)
            whole, found = await room(store), await counts(store)
            assert whole > SLOTS * 3 // 4
            assert all(abs(n - whole / number) <= 1 for n in found.values()), found


@pytest.mark.parametrize(("share", "tenants"), [(0.05, 20), (0.5, 8)])
async def test_tenants_that_save_at_once_have_their_shares_within_one_block(
    make, kit, share, tenants
):
    """Shares that exceed the whole together are smaller in proportion."""
    async with kit.opened(make(Quotas(share))) as store:
        for turn in range(240 // tenants):
            for name in range(tenants):
                await store.save(chain(kit, name, turn, 1 + (name + turn) % 3))
        whole, found = await room(store), await counts(store)
        assert all(abs(found[tenant(n)] - whole / tenants) <= 1 for n in range(tenants)), found


def test_who_is_below_its_share_gives_only_to_itself():
    """Also where those above it cannot: what they have may be pinned."""
    usage = {b"above": 40, b"below": 20, b"saves": 10, b"far above": 90}
    givers = Quotas(0.1).givers(usage, 300, {b"saves"})
    assert givers == [(b"far above", 50), (b"above", 10), (b"saves", 0)]


async def test_who_has_no_share_goes_first(make, kit):
    async with kit.opened(make(Quotas(0.0, {tenant("paid"): 0.5}))) as store:
        await press(store, kit, "paid", 24)
        await press(store, kit, "free", 2 * SLOTS)
        await press(store, kit, "paid", 16, start=100)
        found = await counts(store)
        assert found[tenant("paid")] == 40


async def test_pinned_blocks_of_a_tenant_above_its_share_stay(make, kit):
    async with kit.opened(make(Quotas(0.1))) as store:
        pinned = [one for number in range(5) for one in chain(kit, "pinned", number)]
        for start in range(0, 20, 4):
            await store.save(pinned[start : start + 4])
        assert all(await store.pin([one.key for one in pinned], float("inf")))
        below = chain(kit, "below", 0)
        assert await store.save(below) == 4
        await press(store, kit, "flood", 2 * SLOTS)
        assert [await store.lookup([one.key]) for one in [*pinned, *below]] == [1] * 24


async def test_below_its_share_a_tenant_loses_at_most_two_points_of_hits_beside_a_flood(make, kit):
    async def hits(store, *, flood: bool) -> int:
        found = 0
        for turn in range(12):
            prompt = chain(kit, "mine", turn % 6)
            found += await store.lookup([one.key for one in prompt])
            await store.save(prompt)
            if flood:
                await press(store, kit, "flood", 40, start=10 * turn)
        return found

    async with kit.opened(make(Quotas(0.5))) as store:
        alone = await hits(store, flood=False)
        await store.delete([one.key for number in range(6) for one in chain(kit, "mine", number)])
        beside = await hits(store, flood=True)
    assert alone == 6 * 4
    assert beside >= 0.98 * alone


# ------------------------------------------------------------------ threads and processes

LARGE = 256 << 10  # in smaller stores so many writers find the index's log too long


async def test_twenty_tenants_in_threads_of_two_openings(tmp_path, kit):
    """As of two processes: each has a connection to the index, and threads, of its own."""
    made = {"capacity": SLOTS * LARGE, "quotas": Quotas(0.05)}
    stores = [DiskBackend(tmp_path / "kv", **made) for _ in range(2)]
    async with kit.opened(stores[0]), kit.opened(stores[1]):

        async def save(name: int) -> None:
            for turn in range(16):
                block = kit.block(kit.key(name, turn), nbytes=LARGE)
                await stores[name % 2].save([replace(block, namespace=space(name))])

        await asyncio.gather(*map(save, range(20)))
        whole, found = await room(stores[0]), await counts(stores[0])
    assert whole > SLOTS * 3 // 4
    assert all(abs(found[tenant(name)] - whole / 20) <= 1 for name in range(20)), found


async def test_blocks_that_are_being_written_count(tmp_path, kit):
    store = DiskBackend(tmp_path / "kv", capacity=CAPACITY, quotas=Quotas(0.4))
    async with kit.opened(store):
        await press(store, kit, "a", 2 * SLOTS)
        await press(store, kit, "b", 2 * SLOTS)
        before = await counts(store)
        writer = store._client.directory.writer
        writing = [writer.reserve(chain(kit, "a", number, 4)) for number in range(900, 903)]
        assert (await counts(store))[tenant("b")] == before[tenant("b")]
        for one in writing:
            writer.release(one)


# ------------------------------------------------------------------ settings


@pytest.mark.parametrize(("text", "share"), [("10%", 0.1), ("0.25", 0.25), ("100%", 1), ("0", 0)])
def test_a_share_of_all(text, share):
    assert quotas_of(StoreUrl.parse(f"memory:?quota={text}")) == Quotas(share)


def test_shares_of_some(tmp_path):
    file = tmp_path / "quotas.json"
    file.write_text(json.dumps({tenant("a").hex(): "30%", "*": "1.5%"}))
    found = quotas_of(StoreUrl.parse(f"disk:kv?quota={file}"))
    assert found == Quotas(0.015, {tenant("a"): 0.3})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file.*or a file"),
        ("[]", "a JSON object of tenants and shares"),
        ('{"*": "110%"}', r"'\*': a share of the capacity such as 10% or 0.1 is needed"),
        ('{"*": 0.1}', "as text"),
        ('{"tenant-7": "10%"}', "'tenant-7': give the 32 hexadecimal digits"),
    ],
)
def test_files_that_are_none(tmp_path, content, said):
    file = tmp_path / "quotas.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigurationError, match=said):
        open_backend(f"disk:{tmp_path}/kv?quota={file}")


@pytest.mark.parametrize("url", ["redis://host", "s3://bucket/kv", "nixl://", "tiered:"])
def test_stores_that_do_not_decide_refuse_a_quota(url):
    with pytest.raises(ConfigurationError, match="disk and memory stores do, also as tiers"):
        open_backend(f"{url}?quota=10%")


def counted(directory: Path) -> tuple[dict, dict]:
    """The bytes of each tenant as they are counted, and as they are."""
    with closing(sqlite3.connect(directory / "index.sqlite3")) as db:
        kept = dict(db.execute("SELECT tenant, nbytes FROM tenants").fetchall())
        found = Counter()
        for namespace, size in db.execute("SELECT namespace, size FROM blocks").fetchall():
            found[tenant_of(namespace)] += size
    return kept, dict(found)


async def test_what_tenants_have_is_counted_whatever_changes_it(tmp_path, kit):
    path = tmp_path / "kv"
    async with kit.opened(DiskBackend(path, capacity=CAPACITY, quotas=Quotas(0.2))) as store:
        for name in ("a", "b", "c", "a"):
            await press(store, kit, name, SLOTS)
        await store.save(kit.chain(kit.keys("without", count=3)))
        kept, found = counted(path)
        assert kept == found
        assert len(found) == 4
        blocks = chain(kit, "b", 23)
        await store.delete([one.key for one in blocks])
        assert counted(path)[0] == counted(path)[1]
        # Another process, that has no quotas of its own, counts too.
        async with kit.opened(DiskBackend(path, capacity=CAPACITY)) as other:
            await press(other, kit, "d", SLOTS // 2)
            assert counted(path)[0] == counted(path)[1]
        drop = [entry.key async for entry in store.scan() if entry.namespace == space("a")]
        await store.delete(drop)
        kept, found = counted(path)
        assert kept == found
        assert tenant("a") not in kept, "nothing is left of a tenant that is dropped"
    # A smaller capacity drops whole data files.
    async with kit.opened(DiskBackend(path, capacity=CAPACITY // 4, quotas=Quotas(0.2))) as store:
        await press(store, kit, "e", 8)
        assert counted(path)[0] == counted(path)[1]


async def test_what_an_older_version_saved_is_counted_at_the_next_eviction(tmp_path, kit):
    """It has the index open, and knows nothing of the counts."""
    path = tmp_path / "kv"
    async with kit.opened(DiskBackend(path, capacity=CAPACITY, quotas=Quotas(0.2))) as store:
        await press(store, kit, "a", SLOTS)
        with closing(sqlite3.connect(path / "index.sqlite3", timeout=30)) as old, old:
            old.execute("UPDATE blocks SET namespace=? WHERE id % 2", (space("z"),))
            columns = "segment, slot, size, length, priority, created, used, namespace, pool_group"
            old.execute(
                f"INSERT INTO blocks(key, {columns})"
                " SELECT x'00', segment, 1 << 40, size, length, priority, created, used,"
                " namespace, pool_group FROM blocks LIMIT 1"
            )
            old.execute("DELETE FROM blocks WHERE key = (SELECT max(key) FROM blocks)")
        assert counted(path)[0] != counted(path)[1]
        await press(store, kit, "b", 4)
        assert counted(path)[0] == counted(path)[1]


def test_the_choice_of_victims_does_not_read_the_index(tmp_path):
    """Neither 100 blocks nor 20,000 take many steps of SQLite's machine."""
    steps = {}
    for number in (100, 20_000):
        directory = tmp_path / str(number)
        directory.mkdir()
        with closing(connect(directory, "process", 1 << 20)) as db:
            eviction = Eviction(db, Quotas(0.1))
            db.execute("BEGIN IMMEDIATE")
            eviction.prepare()
            columns = "key, segment, slot, size, length, priority, created, used, namespace"
            rows = [
                (n.to_bytes(8), 1, n, 4096, 4096, 35, n, n, space(n % 20)) for n in range(number)
            ]
            db.executemany(
                f"INSERT INTO blocks({columns}, pool_group) VALUES(?,?,?,?,?,?,?,?,?,0)", rows
            )
            eviction.usage({})
            taken = itertools.count()
            db.set_progress_handler(lambda taken=taken: next(taken) < 0, 10)
            saving = {tenant(0): 4 * 4096}
            usage = eviction.usage(saving)
            givers = eviction.givers(usage, number * 4096, saving)
            victims = eviction.victims(4096, 4, set(), givers, usage)
            db.set_progress_handler(None, 0)
            assert len(victims) == 4
            eviction.drop(victims)
            db.execute("COMMIT")
            steps[number] = next(taken)
    assert steps[20_000] < 3 * steps[100]
