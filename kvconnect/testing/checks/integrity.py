"""Checks that a load through the framework is right or a miss, whatever the stored bytes."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from unittest.mock import patch

from kvconnect import frame
from kvconnect.backends.guard.store import GuardedBackend
from kvconnect.keys import FORMAT_VERSION, BlockKey
from kvconnect.testing.blocks import BlockMaker
from kvconnect.testing.check import Violation, check, demand
from kvconnect.testing.subject import Subject, Unsupported
from kvconnect.trace import metrics

_END = frame.HEADER_NBYTES + BlockMaker.layout.block_nbytes


@asynccontextmanager
async def _saved(
    subject: Subject, name: str, count: int
) -> AsyncIterator[tuple[GuardedBackend, BlockMaker, list[BlockKey]]]:
    blocks = subject.blocks(name)
    keys = blocks.keys(count=count)
    async with subject.guarded() as store:
        await store.save([blocks.block(key) for key in keys])
        yield store, blocks, keys


async def _expect_misses(
    store: GuardedBackend, blocks: BlockMaker, keys: list[BlockKey], what: str
) -> None:
    """Demands that no block is a hit, that each is dropped, and that each can be saved again."""
    before = _bad_frames()
    for key in keys:
        (into,) = blocks.buffers(1)
        loaded = await store.load([key], [into])
        demand(not loaded or blocks.holds(into, key), f"{what}: a wrong block was a hit")
        demand(not loaded, f"{what}: a block that was damaged is a hit")
        demand(blocks.margins_whole(into), f"{what}: the load wrote outside of its buffer")
        demand(await store.lookup([key]) == 0, f"{what}: lookup still says yes after the load")
    demand(_bad_frames() > before, f"{what}: bad blocks were not counted")
    before = _bad_frames()
    for key in keys:
        await store.load([key], blocks.buffers(1))
    demand(_bad_frames() == before, f"{what}: a bad block was found a second time")
    stored = await store.save([blocks.block(key) for key in keys])
    demand(stored == len(keys), f"{what}: the blocks cannot be saved again")
    all_into = blocks.buffers(len(keys))
    demand(await store.load(keys, all_into) == len(keys), f"{what}: not loaded again")
    demand(all(map(blocks.holds, all_into, keys)), f"{what}: wrong after being saved again")


def _bad_frames() -> float:
    return metrics.snapshot().get("store.bad_frame", 0)


async def _frames(subject: Subject, store: GuardedBackend, keys: list[BlockKey]) -> list[bytes]:
    frames = [await subject.peek(store.inner, key) for key in keys]
    found = [data for data in frames if data is not None]
    if len(found) < len(frames):
        raise Violation("peek() finds nothing under a key that was saved")
    return found


async def _flip(subject: Subject, name: str, places: Sequence[int]) -> None:
    chance = random.Random(subject.seed)
    async with _saved(subject, name, len(places)) as (store, blocks, keys):
        for key, place in zip(keys, places, strict=True):
            await subject.corrupt(store.inner, key, place, 1 << chance.randrange(8))
        await _expect_misses(store, blocks, keys, f"a flipped bit in the {name}")


@check("integrity")
async def flipped_header(subject: Subject) -> None:
    """A flipped bit anywhere in a frame's header is a miss; the block is dropped once."""
    chance = random.Random(subject.seed)
    await _flip(subject, "header", [0, 127, *(chance.randrange(128) for _ in range(10))])


@check("integrity")
async def flipped_payload(subject: Subject) -> None:
    """A flipped bit anywhere in the payload is a miss; the block is dropped once."""
    chance = random.Random(subject.seed + 1)
    await _flip(subject, "payload", [128, *(chance.randrange(128, _END) for _ in range(10))])


@check("integrity")
async def flipped_end(subject: Subject) -> None:
    """A flipped bit in the last bytes of the payload is a miss."""
    await _flip(subject, "last bytes", [_END - 1, _END - 2, _END - 8])


@check("integrity")
async def truncated(subject: Subject) -> None:
    """A value cut to nothing, by one byte of its payload, or at any 4 KiB is a miss."""
    lengths = [0, 1, _END - 1, *range(4096, _END, 4096)]
    async with _saved(subject, "truncated", len(lengths)) as (store, blocks, keys):
        for key, data, length in zip(
            keys, await _frames(subject, store, keys), lengths, strict=True
        ):
            await subject.poke(store.inner, key, data[:length])
        await _expect_misses(store, blocks, keys, "a value cut short")


@check("integrity")
async def truncated_padding(subject: Subject) -> None:
    """A value that lost bytes of its padding only is right or a miss."""
    async with _saved(subject, "padding", 1) as (store, blocks, keys):
        (data,) = await _frames(subject, store, keys)
        await subject.poke(store.inner, keys[0], data[:-1])
        (into,) = blocks.buffers(1)
        loaded = await store.load(keys, [into])
        right = blocks.holds(into, keys[0])
        demand(not loaded or right, "a block without the end of its padding is wrong")
        stored = await store.save([blocks.block(keys[0])])
        demand(stored == 1, "a block without the end of its padding cannot be saved again")


@check("integrity")
async def longer(subject: Subject) -> None:
    """A value with bytes behind its end is a miss, or right; nothing beyond is written."""
    async with _saved(subject, "longer", 3) as (store, blocks, keys):
        frames = await _frames(subject, store, keys)
        for key, data, more in zip(keys, frames, (1, 4096, 5000), strict=True):
            try:
                await subject.poke(store.inner, key, data + b"\xa5" * more)
            except Unsupported:
                await subject.corrupt(store.inner, key, 0)
        await _expect_misses(store, blocks, keys, "a value longer than written")


@check("integrity")
async def swapped(subject: Subject) -> None:
    """Blocks that are swapped are misses: a sound block under another key is no hit."""
    async with _saved(subject, "swapped", 2) as (store, blocks, keys):
        one, other = await _frames(subject, store, keys)
        await subject.poke(store.inner, keys[0], other)
        await subject.poke(store.inner, keys[1], one)
        await _expect_misses(store, blocks, keys, "two blocks swapped")


@check("integrity")
async def older_generation(subject: Subject) -> None:
    """The bytes that a slot held before are a miss under the key that it holds now."""
    async with _saved(subject, "older", 2) as (store, blocks, keys):
        old = await _frames(subject, store, keys)
        await store.delete(keys)
        newer = blocks.keys("newer", count=2)
        await store.save([blocks.block(key) for key in newer])
        for key, data in zip(newer, old, strict=True):
            await subject.poke(store.inner, key, data)
        await _expect_misses(store, blocks, newer, "an older generation")


@check("integrity")
async def future_format(subject: Subject) -> None:
    """A frame of a future format version, sound by its own rules, is a miss."""
    async with _saved(subject, "future", 0) as (store, blocks, _):
        keys = blocks.keys(count=2)
        with patch.object(frame, "FORMAT_VERSION", FORMAT_VERSION + 1):
            await store.save([blocks.block(key) for key in keys])
        await _expect_misses(store, blocks, keys, "a future format")


@check("integrity")
async def garbage(subject: Subject) -> None:
    """Bytes at random, zeros, and another store's values are misses."""
    chance = random.Random(subject.seed)
    size = BlockMaker.frame_nbytes
    async with _saved(subject, "garbage", 3) as (store, blocks, keys):
        for key, data in zip(
            keys, (chance.randbytes(size), bytes(size), b"\xff" * size), strict=True
        ):
            await subject.poke(store.inner, key, data)
        await _expect_misses(store, blocks, keys, "garbage")


@check("integrity")
async def one_of_many(subject: Subject) -> None:
    """A bad block of a batch ends the run there; those before are right, those after stay."""
    async with _saved(subject, "one of many", 6) as (store, blocks, keys):
        await subject.corrupt(store.inner, keys[3], 1000)
        into = blocks.buffers(6)
        loaded = await store.load(keys, into)
        demand(loaded == 3, f"with the fourth of six bad, load said {loaded}")
        demand(
            all(map(blocks.holds, into, keys[:3])),
            "a good block before a bad one is wrong",
        )
        found = [await store.lookup([key]) for key in keys]
        demand(found == [1, 1, 1, 0, 1, 1], f"after one bad block of six, lookups say {found}")
