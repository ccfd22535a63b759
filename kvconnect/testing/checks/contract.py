"""Checks the four methods: their results, and the memory that they write to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from kvconnect.backend import Backend, StoredBlock
from kvconnect.keys import BlockKey
from kvconnect.testing.blocks import BlockMaker
from kvconnect.testing.check import check, demand
from kvconnect.testing.subject import Subject

_SIZES = (0, 1, 4095, 4096, 4097, 2 << 20)
_LARGE = 32 << 20
_MOST_SCRUBS = 10_000


async def expect_stored(
    store: Backend, blocks: BlockMaker, keys: Sequence[BlockKey], *, nbytes: int | None = None
) -> None:
    """Demands that each of `keys` can be looked up and loaded, and is right."""
    demand(await store.lookup(keys) == len(keys), f"not all of {len(keys)} blocks are found")
    into = blocks.buffers(len(keys), nbytes)
    loaded = await store.load(keys, into)
    demand(loaded == len(keys), f"load filled {loaded} of {len(keys)} blocks that are stored")
    for buffer, key in zip(into, keys, strict=True):
        demand(blocks.holds(buffer, key, framed=nbytes is None), "a loaded block is wrong")


def _fitting(subject: Subject, sizes: Sequence[int]) -> list[int]:
    longest = subject.capabilities().max_value_bytes
    return [size for size in sizes if longest is None or size <= longest]


@check("contract")
async def round_trip(subject: Subject) -> None:
    """Values of 0, 1, 4095, 4096, 4097 bytes and 2 MiB come back whole, at any address."""
    blocks = subject.blocks("round trip")
    async with subject.opened() as store:
        for nbytes in _fitting(subject, _SIZES):
            for shift in (0, 1, 512):
                key = blocks.key(nbytes, shift)
                what = f"{nbytes} bytes at a page + {shift}"
                stored = await store.save([blocks.block(key, nbytes=nbytes, shift=shift)])
                demand(stored == 1, f"{what}: save stored {stored} blocks, not 1")
                into = blocks.buffer(nbytes, shift=513 - shift)
                loaded = await store.load([key], [into])
                demand(loaded == 1, f"{what}: load filled {loaded} blocks, not 1")
                demand(blocks.holds(into, key, framed=False), f"{what}: came back changed")


@check("contract")
async def large_value(subject: Subject) -> None:
    """A value of 32 MiB, or of the declared `max_value_bytes`, comes back whole."""
    longest = subject.capabilities().max_value_bytes
    nbytes = _LARGE if longest is None else min(_LARGE, longest)
    blocks = subject.blocks("large")
    key = blocks.key(nbytes)
    async with subject.opened() as store:
        stored = await store.save([blocks.block(key, nbytes=nbytes)])
        demand(stored == 1, f"{nbytes} bytes: save stored {stored} blocks, not 1")
        into = blocks.buffer(nbytes)
        demand(await store.load([key], [into]) == 1, f"{nbytes} bytes: not loaded")
        demand(blocks.holds(into, key, framed=False), f"{nbytes} bytes: came back changed")
        await store.delete([key])


@check("contract")
async def mixed_batch(subject: Subject) -> None:
    """Values of different sizes in one batch come back in order."""
    blocks = subject.blocks("mixed")
    sizes = _fitting(subject, _SIZES) * 2
    keys = blocks.keys(count=len(sizes))
    async with subject.opened() as store:
        saved = await store.save(
            [blocks.block(key, nbytes=size) for key, size in zip(keys, sizes, strict=True)]
        )
        demand(saved == len(keys), f"save stored {saved} of {len(keys)} blocks")
        into = [blocks.buffer(size) for size in sizes]
        loaded = await store.load(keys, into)
        demand(loaded == len(keys), f"load filled {loaded} of {len(keys)} blocks")
        for size, buffer, key in zip(sizes, into, keys, strict=True):
            demand(blocks.holds(buffer, key, framed=False), f"a value of {size} bytes is wrong")


@check("contract")
async def long_batch(subject: Subject) -> None:
    """A batch of 600 blocks is stored, found and loaded in one call."""
    async with subject.prepared("long batch", 600) as (store, blocks, keys):
        saved = await store.save(blocks.chain(keys, nbytes=4096))
        demand(saved == len(keys), f"save stored {saved} of {len(keys)} blocks")
        await expect_stored(store, blocks, keys, nbytes=4096)


@check("contract")
async def absent_key(subject: Subject) -> None:
    """An absent key is a miss, its buffer stays as it was, and the next call works."""
    async with subject.prepared("absent", 2) as (store, blocks, (absent, present)):
        for _ in range(2):
            into = blocks.buffers(1)
            found = await asyncio.wait_for(store.lookup([absent]), subject.patience_s)
            demand(found == 0, f"lookup of an absent key said {found}")
            loaded = await asyncio.wait_for(store.load([absent], into), subject.patience_s)
            demand(loaded == 0, f"load of an absent key said {loaded}")
            demand(blocks.untouched(into[0]), "load of an absent key wrote to its buffer")
        await asyncio.wait_for(store.save([blocks.block(present)]), subject.patience_s)
        await asyncio.wait_for(expect_stored(store, blocks, [present]), subject.patience_s)


@check("contract")
async def empty_batch(subject: Subject) -> None:
    """Calls with no keys at all return 0 and raise nothing."""
    async with subject.opened() as store:
        demand(await store.lookup([]) == 0, "lookup of nothing is not 0")
        demand(await store.load([], []) == 0, "load of nothing is not 0")
        demand(await store.save([]) == 0, "save of nothing is not 0")
        await store.delete([])


@check("contract")
async def leading_count(subject: Subject) -> None:
    """Lookups and loads count leading blocks: the first absent one ends the run."""
    async with subject.prepared("leading", 6) as (store, blocks, keys):
        await store.save([blocks.block(key) for key in (*keys[:3], *keys[4:])])
        found = await store.lookup(keys)
        demand(found == 3, f"lookup with the fourth of six absent said {found}, not 3")
        loaded = await store.load(keys, blocks.buffers(6))
        demand(loaded == 3, f"load with the fourth of six absent said {loaded}, not 3")
        demand(await store.lookup(keys[3:]) == 0, "a run that begins with an absent key is not 0")


@check("contract")
async def loaded_is_right(subject: Subject) -> None:
    """The blocks that load counts are right; the following and surrounding memory is untouched."""
    async with subject.prepared("untouched", 6) as (store, blocks, keys):
        await store.save([blocks.block(key) for key in (*keys[:3], *keys[4:])])
        into = blocks.buffers(6)
        loaded = await store.load(keys, into)
        for buffer, key in zip(into[:loaded], keys, strict=False):
            demand(blocks.holds(buffer, key), "a block that load counted is wrong")
        # The frame layer tolerates writes to a buffer that is not counted, but none outside of
        # buffers.
        demand(blocks.untouched(into[3]), "load wrote to the buffer of an absent block")
        for buffer in into:
            demand(blocks.margins_whole(buffer), "load wrote outside of a buffer")


@check("contract")
async def other_length(subject: Subject) -> None:
    """A value longer than its buffer is a miss that ends the run; nothing outside is written to."""
    async with subject.prepared("length", 3) as (store, blocks, keys):
        await store.save([blocks.block(key, nbytes=8192) for key in keys])
        for size in (4096, 8191, 0):
            into = [blocks.buffer(8192), blocks.buffer(size), blocks.buffer(8192)]
            loaded = await store.load(keys, into)
            demand(loaded == 1, f"8192 bytes into a buffer of {size}: load said {loaded}, not 1")
            demand(blocks.margins_whole(into[1]), "load wrote outside of a buffer that is short")
        demand(await store.lookup(keys) == 3, "a load into a short buffer lost the block")


@check("contract")
async def longer_buffer(subject: Subject) -> None:
    """A value shorter than its buffer is a miss, or fills its beginning if `variable_length`."""
    fills = subject.capabilities().variable_length
    async with subject.prepared("longer buffer", 2) as (store, blocks, keys):
        await store.save([blocks.block(key, nbytes=4096) for key in keys])
        for size in (4097, 8192):
            into = blocks.buffers(2, size)
            loaded = await store.load(keys, into)
            demand(
                loaded == (2 if fills else 0),
                f"values of 4096 bytes into buffers of {size}: load said {loaded}"
                f" and variable_length is {fills}",
            )
            for key, buffer in zip(keys, into, strict=True):
                demand(blocks.margins_whole(buffer), "load wrote outside of a buffer")
                right = torch.equal(buffer[:4096], blocks.content(key, 4096))
                demand(right or not fills, "the beginning of a longer buffer is wrong")


@check("contract")
async def save_again(subject: Subject) -> None:
    """Saves of stored blocks count as stored, and change nothing."""
    async with subject.prepared("again", 4) as (store, blocks, keys):
        before = (await store.stats()).get("blocks")
        for _ in range(3):
            saved = await store.save([blocks.block(key) for key in keys])
            demand(saved == 4, f"saving 4 blocks again said {saved}")
        after = (await store.stats()).get("blocks")
        if before is not None and after is not None:
            demand(after == before + 4, f"4 blocks saved three times are {after - before} blocks")
        await expect_stored(store, blocks, keys)


@check("contract")
async def duplicates(subject: Subject) -> None:
    """A key that is twice in a batch is one block, and each of its buffers is filled."""
    async with subject.prepared("duplicate", 2) as (store, blocks, (key, other)):
        saved = await store.save([blocks.block(one) for one in (key, other, key, key)])
        demand(saved == 4, f"a batch of 4 with duplicates: save said {saved}")
        found = await store.lookup([key, key, other])
        demand(found == 3, f"a lookup of 3 with a duplicate said {found}")
        await expect_stored(store, blocks, [key, key, other])


@check("contract")
async def delete(subject: Subject) -> None:
    """Blocks that are deleted are gone, others stay, absent ones are no error, all can return."""
    async with subject.prepared("delete", 4) as (store, blocks, keys):
        await store.save([blocks.block(key) for key in keys])
        await store.delete([keys[1], blocks.key("never saved")])
        await store.delete([keys[1]])
        found = [await store.lookup([key]) for key in keys]
        demand(found == [1, 0, 1, 1], f"after deleting the second of four, lookups say {found}")
        loaded = await store.load([keys[1]], blocks.buffers(1))
        demand(loaded == 0, "a deleted block was loaded")
        saved = await store.save([blocks.block(key) for key in keys])
        demand(saved == 4, f"saving a deleted block again said {saved}")
        await expect_stored(store, blocks, keys)


@check("contract")
async def scrub(subject: Subject) -> None:
    """A scrub after deletes ends, and changes no stored block."""
    async with subject.prepared("scrub", 6) as (store, blocks, keys):
        await store.save([blocks.block(key) for key in keys])
        await store.delete(keys[::2])
        for _ in range(_MOST_SCRUBS):
            if not await store.scrub():
                break
        else:
            demand(condition=False, message=f"scrub said {_MOST_SCRUBS} times that there is more")
        found = [await store.lookup([key]) for key in keys]
        demand(found == [0, 1] * 3, f"after deleting every other block, lookups say {found}")
        await expect_stored(store, blocks, keys[1::2])


@check("contract")
async def answers_follow(subject: Subject) -> None:
    """Lookups and loads follow each save and delete, whatever the same calls answered before."""
    async with subject.prepared("follow", 4) as (store, blocks, keys):
        for turn in range(6):
            there = 4 * (turn % 2)
            for _ in range(2):  # cached answers about these must be dropped
                found = await store.lookup(keys)
                demand(found == there, f"turn {turn}: lookup said {found}, not {there}")
                loaded = await store.load(keys, blocks.buffers(4))
                demand(loaded == there, f"turn {turn}: load said {loaded}, not {there}")
            if there:
                await store.delete(keys)
            else:
                await store.save(blocks.chain(keys))


@check("contract")
async def own_copy(subject: Subject) -> None:
    """The store keeps a copy of its own: later writes to the caller's buffer do not change it."""
    async with subject.prepared("copy", 1) as (store, blocks, (key,)):
        block = blocks.block(key)
        await store.save([block])
        block.data.zero_()
        await expect_stored(store, blocks, [key])
        into = blocks.buffers(1)
        await store.load([key], into)
        into[0].zero_()
        await expect_stored(store, blocks, [key])


@check("contract")
async def read_only_input(subject: Subject) -> None:
    """Saves do not write to the given blocks, nor around them."""
    async with subject.prepared("input", 1) as (store, blocks, (key,)):
        block = blocks.block(key)
        await store.save([block])
        demand(blocks.holds(block.data, key), "save changed the buffer it was given")


@check("contract")
async def metadata(subject: Subject) -> None:
    """Blocks with and without parent, tokens and priority are all stored."""
    async with subject.prepared("metadata", 5) as (store, blocks, keys):
        saved = await store.save(
            [
                blocks.block(keys[0]),
                blocks.block(keys[1], keys[0], tokens=[0, 2**31 - 1, -7]),
                blocks.block(keys[2], keys[1], tokens=[]),
                blocks.block(keys[3], keys[1], priority=0),
                StoredBlock(keys[4], blocks.block(keys[4]).data, priority=100, group=3),
            ]
        )
        demand(saved == 5, f"save stored {saved} of 5 blocks with all kinds of metadata")
        await expect_stored(store, blocks, keys)


@check("contract")
async def without_layouts(subject: Subject) -> None:
    """An ``open([])`` works: tools that move blocks know no layouts."""
    blocks = subject.blocks("no layouts")
    key = blocks.key()
    store = subject.bare(subject.make_backend())
    await store.open([])
    try:
        demand(await store.save([blocks.block(key)]) == 1, "a store without layouts stores nothing")
        await expect_stored(store, blocks, [key])
    finally:
        await store.close()
