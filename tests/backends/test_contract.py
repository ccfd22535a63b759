"""What every store promises, bare and guarded."""

from __future__ import annotations

import asyncio

import pytest
import torch

SIZES = [0, 1, 4095, 4096, 4097, 2 << 20]


@pytest.fixture
async def store(make_backend, kit):
    async with kit.opened(make_backend()) as backend:
        yield backend


@pytest.fixture
async def bare(make_bare, kit):
    async with kit.opened(make_bare()) as backend:
        yield backend


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("shift", [0, 1, 512])
async def test_block_of_any_size_at_any_address_comes_back_whole(bare, kit, nbytes, shift):
    key = kit.key(nbytes, shift)
    assert await bare.save([kit.block(key, nbytes=nbytes, shift=shift)]) == 1
    into = kit.buffer(nbytes, shift=513 - shift)
    assert await bare.load([key], [into]) == 1
    assert kit.holds(into, key, framed=False)


async def test_mixed_sizes_in_one_batch_come_back_in_order(bare, kit):
    keys = kit.keys("mixed", count=3 * len(SIZES))
    sizes = SIZES * 3
    blocks = [kit.block(key, nbytes=size) for key, size in zip(keys, sizes, strict=True)]
    assert await bare.save(blocks) == len(keys)
    into = [kit.buffer(size) for size in sizes]
    assert await bare.load(keys, into) == len(keys)
    assert all(kit.holds(b, key, framed=False) for b, key in zip(into, keys, strict=True))


async def test_batch_larger_than_one_read_comes_back_whole(store, kit):
    keys = kit.keys("large", count=700)
    assert await store.save(kit.chain(keys)) == 700
    assert await store.lookup(keys) == 700
    into = kit.buffers(700)
    assert await store.load(keys, into) == 700
    assert all(kit.holds(b, key) for b, key in zip(into, keys, strict=True))


async def test_absent_key_is_a_miss_and_its_buffer_stays_untouched(store, kit):
    into = kit.buffers(1)
    assert await store.lookup([kit.key("absent")]) == 0
    assert await store.load([kit.key("absent")], into) == 0
    assert kit.untouched(into[0])


async def test_empty_batches_are_no_work(store):
    assert await store.lookup([]) == 0
    assert await store.load([], []) == 0
    assert await store.save([]) == 0
    await store.delete([])


async def test_counts_are_of_leading_blocks(store, kit):
    keys = kit.keys("leading", count=6)
    await store.save([kit.block(key) for key in (*keys[:3], *keys[4:])])
    into = kit.buffers(6)
    assert await store.lookup(keys) == 3
    assert await store.load(keys, into) == 3
    assert all(kit.holds(b, key) for b, key in zip(into[:3], keys, strict=False))
    assert all(kit.untouched(b) for b in into[3:])


async def test_value_of_another_length_ends_the_run(bare, kit):
    keys = kit.keys("length", count=3)
    await bare.save([kit.block(key, nbytes=8192) for key in keys])
    into = [kit.buffer(8192), kit.buffer(4096), kit.buffer(8192)]
    assert await bare.load(keys, into) == 1
    assert kit.untouched(into[1])


async def test_saving_again_changes_nothing(store, kit):
    keys = kit.keys("again", count=4)
    for _ in range(3):
        assert await store.save([kit.block(key) for key in keys]) == 4
    assert (await store.stats())["blocks"] == 4
    assert await kit.stored(store, keys) == [True] * 4


async def test_duplicate_keys_in_one_batch_are_one_block(store, kit):
    key, other = kit.keys("duplicate", count=2)
    assert await store.save([kit.block(k) for k in (key, other, key, key)]) == 4
    assert (await store.stats())["blocks"] == 2
    into = kit.buffers(3)
    assert await store.load([key, key, other], into) == 3
    assert all(kit.holds(b, k) for b, k in zip(into, (key, key, other), strict=True))


async def test_deleted_blocks_are_gone_and_can_be_saved_again(store, kit):
    keys = kit.keys("delete", count=4)
    await store.save([kit.block(key) for key in keys])
    await store.delete([keys[1], kit.key("never saved")])
    assert await store.lookup(keys) == 1
    assert await kit.stored(store, keys) == [True, False, True, True]
    assert await store.save([kit.block(key) for key in keys]) == 4
    assert await store.lookup(keys) == 4


async def test_children_are_listed_with_their_tokens(store, kit):
    root, full, tail, other = kit.keys("children", count=4)
    await store.save(
        [
            kit.block(root, tokens=[1, 2]),
            kit.block(full, root, tokens=[3, 4]),
            kit.block(tail, root, tokens=[3]),
            kit.block(other, full, tokens=[-7]),
        ]
    )
    found = {child.key: child.tokens.tolist() for child in await store.children(root)}
    assert found == {full: [3, 4], tail: [3]}
    assert [child.key for child in await store.children(None)] == [root]
    await store.delete([tail])
    assert [child.key for child in await store.children(root)] == [full]


async def test_scan_lists_everything_once(store, kit):
    keys = kit.keys("scan", count=50)
    await store.save([kit.block(key, priority=7) for key in keys])
    entries = [entry async for entry in store.scan()]
    assert sorted(entry.key for entry in entries) == sorted(keys)
    assert {(entry.nbytes, entry.priority) for entry in entries} == {(kit.frame_nbytes, 7)}


async def test_concurrent_calls_each_get_their_own_answer(store, kit):
    batches = [kit.keys("concurrent", n, count=5) for n in range(20)]
    saved = await asyncio.gather(*(store.save(kit.chain(keys)) for keys in batches))
    assert saved == [5] * 20
    into = [kit.buffers(5) for _ in batches]
    loaded = await asyncio.gather(
        *(store.load(keys, bufs) for keys, bufs in zip(batches, into, strict=True))
    )
    assert loaded == [5] * 20
    for keys, buffers in zip(batches, into, strict=True):
        assert all(kit.holds(b, key) for b, key in zip(buffers, keys, strict=True))


async def test_loads_race_saves_and_deletes_of_the_same_keys(make_backend, kit):
    async with kit.opened(make_backend(capacity=20 * kit.frame_nbytes)) as store:
        keys = kit.keys("race", count=40)

        async def write(start):
            for at in range(start, start + 60):
                await store.save([kit.block(keys[at % 40])])

        async def drop():
            for key in keys[::2]:
                await store.delete([key])

        async def read():
            for _ in range(3):
                await kit.stored(store, keys)

        await asyncio.gather(write(0), write(20), drop(), read(), read())
        assert await store.save([kit.block(keys[0])]) == 1
        assert await kit.stored(store, keys[:1]) == [True]


async def test_close_waits_for_calls_in_flight_and_works_twice(make_backend, kit):
    store = make_backend()
    await store.open([kit.layout])
    keys = kit.keys("closing", count=200)
    saving = asyncio.ensure_future(store.save(kit.chain(keys)))
    await asyncio.sleep(0)
    await store.close()
    await store.close()
    results = await asyncio.gather(saving, return_exceptions=True)
    assert results == [200] or isinstance(results[0], OSError)


async def test_closed_store_refuses_calls(make_backend, kit):
    store = make_backend()
    await store.open([kit.layout])
    await store.close()
    with pytest.raises(OSError, match=r"closed|not open"):
        await store.lookup([kit.key(1)])


async def test_values_do_not_share_memory_with_the_buffers_they_came_in(store, kit):
    key = kit.key("copy")
    block = kit.block(key)
    await store.save([block])
    block.data.zero_()
    assert await kit.stored(store, [key]) == [True]
    assert torch.count_nonzero(block.data) == 0
