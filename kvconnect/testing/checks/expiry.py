"""Checks time: blocks that expire, and clocks that jump."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from kvconnect.testing.check import Violation, check, demand
from kvconnect.testing.checks.contract import expect_stored
from kvconnect.testing.faults.clock import ShiftedClock
from kvconnect.testing.faults.faulty_backend import FaultyBackend
from kvconnect.testing.subject import Subject

_TTL_S = 60.0
_OWN_TTL_S = 0.25
_DAY_S = 86400.0


@check("time")
async def ttl_border(subject: Subject) -> None:
    """A block is there until its TTL is over, then it is absent and can be saved again."""
    subject.require("expires")
    blocks = subject.blocks("ttl")
    keys = blocks.keys(count=4)
    ttl_s = subject.ttl_s or _TTL_S

    async def expect_fresh(saved_at: float) -> None:
        try:
            await expect_stored(store, blocks, keys)
        except Violation:
            if time.monotonic() - saved_at < ttl_s * 0.9:  # else the machine was too slow
                raise

    with ShiftedClock() as clock:
        async with subject.opened(subject.make_expiring(ttl_s)) as store:
            start = time.monotonic()
            await store.save(blocks.chain(keys, tokens=[1]))
            await subject.pass_time(clock, ttl_s * 0.5)
            await expect_fresh(start)
            await subject.pass_time(clock, ttl_s * 0.6)
            demand(await store.lookup(keys) == 0, "lookup finds blocks that have expired")
            for key in keys:
                loaded = await store.load([key], blocks.buffers(1))
                demand(loaded == 0, "a block that has expired is loaded")
            if store.capabilities.enumerable:
                demand(not await store.children(keys[0]), "a block that has expired is listed")
            start = time.monotonic()
            demand(await store.save(blocks.chain(keys)) == 4, "expired blocks are not saved again")
            await expect_fresh(start)


@check("time")
async def ttl_of_a_block(subject: Subject) -> None:
    """A block with a time of its own is absent after it; others that were saved with it stay."""
    subject.require("expires_each")
    with ShiftedClock() as clock:
        async with subject.prepared("own ttl", 4) as (store, blocks, keys):
            chain = blocks.chain(keys)
            end = time.time() + _OWN_TTL_S
            own = [replace(one, expires_at=end) for one in chain[2:]]
            saved = await store.save([*chain[:2], *own])
            demand(saved == 4, f"save stored {saved} of 4 blocks")
            clock.forward(2 * _OWN_TTL_S)
            await asyncio.sleep(2 * _OWN_TTL_S)  # a server may keep the time, by its own clock
            found = await store.lookup(keys)
            demand(found == 2, f"lookup finds {found} of 2 blocks without and 2 with expires_at")
            loaded = await store.load(keys[2:3], blocks.buffers(1))
            demand(loaded == 0, "a block whose own time is over is loaded")
            await expect_stored(store, blocks, keys[:2])


async def _jump(subject: Subject, seconds: float) -> None:
    with ShiftedClock() as clock:
        async with subject.prepared(f"jump {seconds}", 4) as (store, blocks, keys):
            await store.save(blocks.chain(keys))
            clock.forward(seconds)
            await expect_stored(store, blocks, keys)
            more = blocks.keys("more", count=4)
            saved = await store.save(blocks.chain(more))
            demand(saved == 4, f"after the clock jumped, save stored {saved} of 4 blocks")
            await expect_stored(store, blocks, [*keys, *more])


@check("time")
async def clock_jumps_forward(subject: Subject) -> None:
    """A wall clock that jumps a month ahead loses nothing that has no TTL."""
    await _jump(subject, 30 * _DAY_S)


@check("time")
async def clock_jumps_back(subject: Subject) -> None:
    """A wall clock that jumps a month back loses nothing, and new blocks are kept."""
    await _jump(subject, -30 * _DAY_S)


@check("time")
async def clock_jumps_in_a_full_store(subject: Subject) -> None:
    """A full store keeps storing new blocks while the wall clock jumps both ways."""
    with ShiftedClock() as clock:
        async with subject.prepared("full jump", 0, slots=40) as (store, blocks, _):
            for turn in range(12):
                clock.forward(30 * _DAY_S * (-1) ** turn)
                keys = blocks.keys(turn, count=16)
                for chain in (keys[:8], keys[8:]):
                    saved = await store.save(blocks.chain(chain))
                    demand(saved == 8, f"after {turn} jumps, save stored {saved} of 8 blocks")
                await expect_stored(store, blocks, keys[:8])
                await expect_stored(store, blocks, keys[8:])


@check("time")
async def deadlines_are_monotonic(subject: Subject) -> None:
    """A wall clock that jumps while a call runs neither ends it nor makes it last longer."""
    blocks = subject.blocks("monotonic")
    keys = blocks.keys(count=4)
    faulty = FaultyBackend(subject.bare(subject.make_backend()), delay_s=0.05)
    with ShiftedClock() as clock:
        async with subject.guarded(10.0, faulty) as store:
            faulty.set("late")
            for seconds in (_DAY_S, -2 * _DAY_S, _DAY_S):
                saving = asyncio.ensure_future(store.save(blocks.chain(keys)))
                await asyncio.sleep(0.01)
                clock.forward(seconds)
                demand(await saving == 4, "a save failed: the clock jumped")
                loaded = await store.load(keys, blocks.buffers(4))
                demand(loaded == 4, f"a load filled {loaded} of 4: the clock jumped")
