"""Checks a failing store through the framework: only time is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TypeVar

from kvconnect.backends.guard.store import GuardedBackend
from kvconnect.errors import BackendTimeout, RetryLater
from kvconnect.testing.blocks import BlockMaker
from kvconnect.testing.check import Violation, check, demand
from kvconnect.testing.faults.faulty_backend import BackendFault, FaultyBackend
from kvconnect.testing.subject import Subject

T = TypeVar("T")

RECOVERY_S = 10.0
"""The seconds within which a store that works again must be used again."""

_BUSY_S = 4.0
"""The seconds that a busy machine may take beyond a deadline."""


def answers_within(deadline_s: float) -> float:
    """Returns the seconds after which a call with this deadline counts as too late."""
    return 2 * deadline_s + _BUSY_S


@asynccontextmanager
async def opened_first(
    subject: Subject, deadline_s: float, faulty: FaultyBackend
) -> AsyncIterator[GuardedBackend]:
    """Opens `faulty` with the framework around it. `deadline_s` applies once the store is open."""
    await faulty.open([BlockMaker.layout])
    async with subject.guarded(deadline_s, faulty) as store:
        yield store


async def answer(call: Awaitable[T], deadline_s: float, what: str) -> T | None:
    """Returns the result of `call`, or ``None`` after an expected error; in time in any case."""
    start = time.monotonic()
    try:
        return await call
    except RetryLater:
        return None
    finally:
        took = time.monotonic() - start
        demand(
            took <= answers_within(deadline_s),
            f"{what} took {took:.1f} s; the deadline is {deadline_s:g} s",
        )


async def calls_in_time(
    store: GuardedBackend, blocks: BlockMaker, deadline_s: float, what: str
) -> None:
    """Demands that each kind of call ends in time, and that loaded blocks are right."""
    keys = blocks.keys(count=3)
    found = await answer(store.lookup(keys), deadline_s, f"{what}: lookup")
    into = blocks.buffers(3)
    loaded = await answer(store.load(keys, into), deadline_s, f"{what}: load")
    for name, count in (("lookup", found), ("load", loaded)):
        demand(0 <= (count or 0) <= 3, f"{what}: {name} of 3 blocks said {count}")
    demand(all(map(blocks.holds, into, keys[: loaded or 0])), f"{what}: a wrong block was a hit")
    for buffer in into:
        demand(blocks.margins_whole(buffer), f"{what}: a load wrote outside of its buffer")
    fresh = blocks.keys(what, count=2)
    await answer(store.save(blocks.chain(fresh)), deadline_s, f"{what}: save")
    await answer(store.delete(fresh[:1]), deadline_s, f"{what}: delete")


async def recovers(
    store: GuardedBackend, blocks: BlockMaker, what: str, *, within_s: float = RECOVERY_S
) -> None:
    """Demands that saves and loads work again within `within_s`."""
    end = time.monotonic() + within_s
    turn = 0
    while True:
        turn += 1
        keys = blocks.keys("recovered", what, turn, count=3)
        try:
            into = blocks.buffers(3)
            if await store.save(blocks.chain(keys)) == 3 == await store.load(keys, into):
                break
            why = "save or load says fewer than there are"
        except RetryLater as error:
            why = str(error)
        demand(time.monotonic() < end, f"{what}: not usable {within_s:g} s afterwards: {why}")
        await asyncio.sleep(0.05)
    demand(all(map(blocks.holds, into, keys)), f"{what}: a block is wrong afterwards")


async def _suffer(subject: Subject, fault: BackendFault, deadline_s: float = 0.5) -> None:
    faulty = FaultyBackend(
        subject.bare(subject.make_backend()), seed=subject.seed, delay_s=1.5 * deadline_s
    )
    blocks = subject.blocks("suffer", fault)
    async with opened_first(subject, deadline_s, faulty) as store:
        await answer(store.save(blocks.chain(blocks.keys(count=3))), deadline_s, "a save")
        faulty.set(fault)
        await calls_in_time(store, blocks, deadline_s, f"a store that does '{fault}'")
        demand(faulty.hits, f"the fault '{fault}' was never met")
        faulty.heal()
        what = f"a store that did '{fault}'"
        await recovers(store, blocks, what, within_s=subject.patience_s)


@check("faults")
async def raises(subject: Subject) -> None:
    """Calls end in time whatever a store raises, and it is used again afterwards."""
    await _suffer(subject, "raise")


@check("faults")
async def hangs(subject: Subject) -> None:
    """Calls to a store that hangs end at their deadline, and it is used again afterwards."""
    await _suffer(subject, "hang")


@check("faults")
async def answers_late(subject: Subject) -> None:
    """A store that answers past the deadline writes to no buffer that was reused."""
    deadline_s = 0.5
    blocks = subject.blocks("late")
    faulty = FaultyBackend(subject.bare(subject.make_backend()), delay_s=1.5 * deadline_s)
    async with opened_first(subject, deadline_s, faulty) as store:
        keys = blocks.keys(count=1)
        await answer(store.save(blocks.chain(keys)), deadline_s, "a save")
        faulty.set("late")
        (into,) = blocks.buffers(1)
        try:
            await store.load(keys, [into])
            raise Violation("a load that is late returned in time")
        except BackendTimeout as error:
            demand(error.pending is not None, "a load past its deadline keeps its buffer")
            if error.pending is not None:
                await asyncio.wrap_future(error.pending)
        into.fill_(0xC5)  # the buffer belongs to another call now
        await asyncio.sleep(2 * deadline_s)
        demand(blocks.untouched(into), "a load past its deadline wrote to a buffer handed on")
        faulty.heal()
        await recovers(store, blocks, "a store that was late", within_s=subject.patience_s)


@check("faults")
async def lies(subject: Subject) -> None:
    """A store that reports everything as present yields misses."""
    await _suffer(subject, "lie")


@check("faults")
async def miscounts(subject: Subject) -> None:
    """A store that returns impossible counts is unavailable, and is used again afterwards."""
    await _suffer(subject, "miscount")


@check("faults")
async def truncates(subject: Subject) -> None:
    """A store that fills half of each buffer yields misses."""
    await _suffer(subject, "truncate")


@check("faults")
async def flips_bits(subject: Subject) -> None:
    """A store that flips bits yields misses."""
    await _suffer(subject, "flip")


@check("faults")
async def swaps(subject: Subject) -> None:
    """A store that mixes blocks up yields misses."""
    await _suffer(subject, "swap")
