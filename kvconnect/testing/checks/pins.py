"""Checks of pinned blocks: kept while the pin lasts, within a share of the capacity."""

from __future__ import annotations

import time
from math import inf

from kvconnect.backend import Backend
from kvconnect.errors import ConfigurationError
from kvconnect.keys import BlockKey
from kvconnect.testing.check import check, demand
from kvconnect.testing.checks.contract import expect_stored
from kvconnect.testing.checks.eviction import press, there
from kvconnect.testing.faults.clock import ShiftedClock
from kvconnect.testing.subject import Subject

_SLOTS = 64
_CHAIN = 12
_HOUR_S = 3600.0


async def _expect(
    store: Backend, keys: list[BlockKey], until: float | None, expected: list[bool]
) -> None:
    answers = list(await store.pin(keys, until))
    demand(
        answers == expected,
        f"pin(…, {'None' if until is None else 'until'}) answered {answers}, not {expected}",
    )


async def _pinned_until(store: Backend, key: BlockKey) -> float:
    (entry,) = await store.describe([key])
    demand(entry is not None, "describe does not know a pinned block")
    return 0.0 if entry is None else entry.pinned_until


@check("pins")
async def refused_without(subject: Subject) -> None:
    """A backend that does not declare `pins` refuses to pin, by name."""
    if subject.capabilities().pins:
        return
    async with subject.prepared("no pins", 1) as (store, blocks, (key,)):
        await store.save([blocks.block(key)])
        try:
            answer = await store.pin([key], inf)
        except ConfigurationError:
            return
    demand(condition=False, message=f"pin answered {answer!r}; it does not declare `pins`")


@check("pins")
async def answers(subject: Subject) -> None:
    """The answer of `pin` is true for each pinned key, and `describe` shows the pin."""
    subject.require("pins")
    async with subject.prepared("pin answers", 3) as (store, blocks, (first, second, absent)):
        await store.save(blocks.chain([first, second]))
        await _expect(store, [], inf, [])
        await _expect(store, [first, absent, second], inf, [True, False, True])
        await _expect(store, [first, first], inf, [True, True])
        end = float(round(time.time() + _HOUR_S))
        await _expect(store, [second], end, [True])
        if store.capabilities.enumerable:
            found = [await _pinned_until(store, key) for key in (first, second)]
            demand(found == [inf, end], f"describe shows pins until {found}, not {[inf, end]}")
        stats = await store.stats()
        demand(stats.get("pinned_blocks") == 2, f"stats show {stats.get('pinned_blocks')} of 2")
        await expect_stored(store, blocks, [first, second])
        await _expect(store, [absent, second], None, [False, True])
        await _expect(store, [second], None, [False])
        if store.capabilities.enumerable:
            demand(not await _pinned_until(store, second), "describe shows a pin that has ended")
        await store.delete([first])
        demand(await store.lookup([first]) == 0, "a pinned block was not deleted")
        demand((await store.stats()).get("pinned_blocks") == 0, "stats count a deleted block")


@check("pins", limit_s=60.0)
async def kept_in_a_full_store(subject: Subject) -> None:
    """The pinned blocks survive three times the capacity of others; unpinned, they are dropped."""
    subject.require("pins")
    async with subject.prepared("pinned", _CHAIN, slots=_SLOTS) as (store, blocks, keys):
        await store.save(blocks.chain(keys))
        await _expect(store, keys, inf, [True] * _CHAIN)
        await press(store, blocks, 3 * _SLOTS)
        left = sum(await there(store, keys, blocks))
        demand(left == _CHAIN, f"{left} of {_CHAIN} pinned blocks are left")
        await expect_stored(store, blocks, keys)
        await _expect(store, keys, None, [True] * _CHAIN)
        await press(store, blocks, 3 * _SLOTS, "after")
        demand(not any(await there(store, keys, blocks)), "unpinned blocks are never dropped")


@check("pins")
async def until_their_time(subject: Subject) -> None:
    """A pin ends at its time: then the blocks are dropped like others."""
    subject.require("pins")
    with ShiftedClock() as clock:
        async with subject.prepared("pin time", _CHAIN, slots=_SLOTS) as (store, blocks, keys):
            await store.save(blocks.chain(keys))
            await _expect(store, keys, time.time() + _HOUR_S, [True] * _CHAIN)
            await press(store, blocks, 3 * _SLOTS)
            demand(all(await there(store, keys, blocks)), "a pin ended before its time")
            await subject.pass_time(clock, 1.1 * _HOUR_S)
            await press(store, blocks, 3 * _SLOTS, "after")
            demand(not any(await there(store, keys, blocks)), "a pin did not end at its time")


@check("pins")
async def within_their_share(subject: Subject) -> None:
    """Pins take a share of the capacity at most, in order; the rest still accepts new blocks."""
    subject.require("pins")
    async with subject.prepared("pin share", _SLOTS, slots=_SLOTS) as (store, blocks, keys):
        for key, block in zip(keys, blocks.chain(keys), strict=True):
            if await store.save([block]) and not all(await store.pin([key], inf)):
                break
        stored = keys[: keys.index(key) + 1]
        pinned = list(await store.pin(stored, inf))
        count = sum(pinned)
        demand(0 < count < _SLOTS - 8, f"{count} of {_SLOTS} blocks could be pinned")
        demand(pinned == sorted(pinned, reverse=True), "a block is pinned, and not one before it")
        await press(store, blocks, 2 * _SLOTS)
        demand(all(await there(store, stored[:count], blocks)), "a pinned block was dropped")


@check("pins")
async def kept_past_their_ttl(subject: Subject) -> None:
    """A pinned block does not expire; it does once it is unpinned."""
    subject.require("pins")
    subject.require("expires")
    ttl_s = subject.ttl_s or 60.0
    expiring = subject.make_expiring(ttl_s)
    with ShiftedClock() as clock:
        async with subject.prepared("pin ttl", 2, backend=expiring) as (store, blocks, keys):
            await store.save(blocks.chain(keys, tokens=[1]))
            await _expect(store, keys[:1], inf, [True])
            await subject.pass_time(clock, 1.5 * ttl_s)
            demand(
                await store.lookup(keys) == 1, "of a pinned and an expired block not one is there"
            )
            await expect_stored(store, blocks, keys[:1])
            await _expect(store, keys[:1], None, [True])
            demand(await store.lookup(keys) == 0, "an unpinned block does not expire")


@check("pins")
async def durable_pins(subject: Subject) -> None:
    """The pins of a `durable` backend still hold after it was closed and made anew."""
    subject.require("pins")
    subject.require("durable")
    async with subject.prepared("durable pins", 2) as (store, blocks, (kept, ended)):
        await store.save(blocks.chain([kept, ended]))
        await _expect(store, [kept, ended], inf, [True, True])
        await _expect(store, [ended], None, [True])
    async with subject.opened() as store:
        await _expect(store, [kept, ended], None, [True, False])
        await store.delete([kept, ended])
