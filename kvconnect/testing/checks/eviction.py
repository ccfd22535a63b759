"""Checks of the blocks that a bounded store drops when it is full."""

from __future__ import annotations

from kvconnect.backend import Backend
from kvconnect.keys import BlockKey
from kvconnect.testing.blocks import BlockMaker
from kvconnect.testing.check import check, demand
from kvconnect.testing.checks.contract import expect_stored
from kvconnect.testing.subject import Subject

_SLOTS = 64
_CHAIN = 20


async def press(store: Backend, blocks: BlockMaker, count: int, *name: object) -> None:
    """Saves `count` blocks one by one, so that each is the newest at its time."""
    for number in range(count):
        key = blocks.key("press", *name, number)
        saved = await store.save([blocks.block(key)])
        demand(saved == 1, f"a full store stored {saved} of 1 new block: it must make room")
        demand(await store.lookup([key]) == 1, "a full store does not find what it just stored")


async def there(store: Backend, keys: list[BlockKey], blocks: BlockMaker) -> list[bool]:
    """Returns for each of `keys` whether it can be loaded; makes no lookups, which count as use."""
    return [await store.load([key], blocks.buffers(1)) == 1 for key in keys]


@check("eviction")
async def chains_from_their_end(subject: Subject) -> None:
    """A full store drops a chain from its end: no block is left without those before it."""
    async with subject.prepared("chain", _SLOTS // 2, slots=_SLOTS) as (store, blocks, keys):
        await store.save(blocks.chain(keys))
        await press(store, blocks, _SLOTS - 16)
        found = await there(store, keys, blocks)
        text = "".join("-x"[one] for one in found)
        demand(found == sorted(found, reverse=True), f"left of a chain, from its beginning: {text}")


@check("eviction")
async def use_counts_for_ancestors(subject: Subject) -> None:
    """A use of a block counts as use of those before it: an unused chain is dropped first."""
    async with subject.prepared("use", 2 * _CHAIN, slots=_SLOTS) as (store, blocks, keys):
        used, unused = keys[:_CHAIN], keys[_CHAIN:]
        await store.save(blocks.chain(used))
        await store.save(blocks.chain(unused))
        await expect_stored(store, blocks, used)
        await press(store, blocks, _SLOTS - 2 * _CHAIN + 8)
        left = [sum(await there(store, chain, blocks)) for chain in (used, unused)]
        demand(
            left[0] == _CHAIN or left[0] > left[1],
            f"of a chain that was used {left[0]} of {_CHAIN} blocks are left, of an unused one "
            f"{left[1]}",
        )


@check("eviction")
async def dropped_is_not_found(subject: Subject) -> None:
    """Blocks that were dropped are not found, also where a lookup had found them before."""
    async with subject.prepared("dropped", _CHAIN, slots=_SLOTS) as (store, blocks, keys):
        await store.save(blocks.chain(keys))
        demand(await store.lookup(keys) == _CHAIN, "a chain that was just stored is not found")
        await press(store, blocks, 3 * _SLOTS)
        for key in keys:
            if await store.lookup([key]):
                loaded = await store.load([key], blocks.buffers(1))
                demand(loaded == 1, "lookup finds a block that was dropped, and load does not")
