"""What our stores promise beyond `kvconnect.testing`, bare and guarded."""

from __future__ import annotations

import pytest


@pytest.fixture
async def store(make_backend, kit):
    async with kit.opened(make_backend()) as backend:
        yield backend


async def test_batch_larger_than_one_read_comes_back_whole(store, kit):
    keys = kit.keys("large", count=700)
    assert await store.save(kit.chain(keys)) == 700
    assert await store.lookup(keys) == 700
    into = kit.buffers(700)
    assert await store.load(keys, into) == 700
    assert all(kit.holds(b, key) for b, key in zip(into, keys, strict=True))


async def test_closed_store_refuses_calls(make_backend, kit):
    store = make_backend()
    await store.open([kit.layout])
    await store.close()
    with pytest.raises(OSError, match=r"closed|not open"):
        await store.lookup([kit.key(1)])


async def test_first_blocks_are_the_children_of_nothing(store, kit):
    root, full = kit.keys("children", count=2)
    await store.save([kit.block(root, tokens=[1, 2]), kit.block(full, root, tokens=[3, 4])])
    assert [child.key for child in await store.children(None)] == [root]
