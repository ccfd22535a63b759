"""Whose a block is: every store keeps the digest of the salt, and some count loads."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from kvconnect.keys import Namespace, salt_of, salt_tag

SPACES = {
    "a": Namespace("a"),
    "a with an adapter": Namespace("a", "adapter"),
    "a by vLLM": Namespace("a", extra_key="engine=vllm"),
    "none": Namespace(),
}


async def listed(store):
    return {entry.key: entry async for entry in store.scan()}


async def test_the_digest_of_the_salt_stands_with_every_block(make_bare, kit):
    blocks = {
        name: replace(kit.block(kit.key(name)), namespace=space.tag())
        for name, space in SPACES.items()
    }
    before = replace(kit.block(kit.key("before")), namespace=SPACES["a"].encode())
    async with kit.opened(make_bare()) as store:
        assert await store.save([*blocks.values(), before]) == 5
        entries = await listed(store)
        described = await store.describe([one.key for one in blocks.values()])
    for name, entry in zip(blocks, described, strict=True):
        assert entry.namespace == entries[entry.key].namespace
        assert salt_of(entry.namespace) == salt_tag(SPACES[name].cache_salt)
    assert salt_of(entries[before.key].namespace) is None, "of a version that kept no salt"


@pytest.mark.parametrize("make_bare", ["memory", "disk"], indirect=True)
async def test_loads_are_counted_lookups_are_not(make_bare, kit):
    keys = kit.keys("a", count=3)
    async with kit.opened(make_bare()) as store:
        await store.save(kit.chain(keys))
        assert await store.lookup(keys) == 3
        assert await store.load(keys, kit.buffers(3)) == 3
        assert await store.load(keys[:2], kit.buffers(2)) == 2
        await store.save(kit.chain(kit.keys("b", count=1)))  # a disk store writes them down
        entries = await listed(store)
    assert [entries[key].hits for key in keys] == [2, 2, 1]


async def test_a_disk_store_of_before_is_read_and_counts_from_then_on(make_disk, path, kit):
    keys = kit.keys("a", count=2)
    async with kit.opened(make_disk()) as store:
        await store.save(kit.chain(keys))
    with closing(sqlite3.connect(path / "index.sqlite3")) as db:
        db.execute("ALTER TABLE blocks DROP COLUMN hits")
    async with kit.opened(make_disk(), "read") as store:
        assert [one.hits for one in (await listed(store)).values()] == [None, None]
        assert await store.load(keys, kit.buffers(2)) == 2
    async with kit.opened(make_disk()) as store:
        assert await store.load(keys, kit.buffers(2)) == 2
    async with kit.opened(make_disk(), "read") as store:
        assert [one.hits for one in (await listed(store)).values()] == [1, 1]
