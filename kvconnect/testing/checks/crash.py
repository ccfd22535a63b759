"""Checks that a process that is killed at any moment leaves whole blocks, or none."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from kvconnect.testing.check import check, demand
from kvconnect.testing.checks.faults import answer
from kvconnect.testing.processes import children
from kvconnect.testing.subject import Subject, Unsupported

_NBYTES = 24 << 10
_BATCH = 4


def _run(
    subject: Subject, name: str, *, kill_after_s: float | None = None, **options: Any
) -> dict[int, bool]:
    """Runs a child until it is killed; returns the numbers of the blocks that it acknowledged."""
    work = {"nbytes": _NBYTES, "batch": _BATCH, "count": 4000, **options}
    child = children.start(subject, "save", name=name, **work)
    acked: dict[int, bool] = {}
    for told in child.listen():
        if "opened" in told:
            if kill_after_s is not None:
                child.kill_later(kill_after_s)
            continue
        acked |= dict.fromkeys(range(told["start"], told["start"] + told["stored"]), True)
    killed = child.status is not None and os.WIFSIGNALED(child.status)
    demand(killed or kill_after_s is None or child.status == 0, f"the child ended: {child.status}")
    return acked if killed or "point" not in options else {**acked, -1: False}


def _first_save(child: children.Child) -> None:
    next(told for told in child.listen() if "stored" in told)


async def _expect_sound(
    subject: Subject, acked: Mapping[str, Mapping[int, bool]], capacity: int | None = None
) -> None:
    """Demands that every acknowledged block is there and right after a kill.

    The other blocks must be right or absent, and the reported usage true.
    """
    store = subject.make_backend() if capacity is None else subject.make_small(capacity)
    async with subject.opened(store) as opened:
        lost = 0
        for name, numbers in acked.items():
            blocks = subject.blocks(name)
            for number in range(max(numbers, default=0) + 3 * _BATCH):
                key = blocks.key(number)
                (into,) = blocks.buffers(1, _NBYTES)
                found = await opened.lookup([key])
                loaded = await opened.load([key], [into])
                # A late lookup may report too few blocks, as in a tiered store.
                demand(loaded >= found, "after a kill a block is found that cannot be loaded")
                right = not loaded or blocks.holds(into, key, framed=False)
                demand(right, f"after a kill block {number} is wrong")
                lost += number in numbers and not loaded
        demand(not lost or capacity, f"after a kill {lost} acknowledged blocks are gone")
        try:
            usage = await subject.usage(opened)
        except Unsupported:
            return
        demand(
            usage.claimed == usage.found,
            f"after a kill it says it uses {usage.claimed:.0f} bytes, {usage.found:.0f} are there",
        )


async def _kills(subject: Subject, capacity: int | None) -> None:
    subject.require("durable")
    chance = random.Random(subject.seed)
    kills = 100 if subject.long else 10
    acked: dict[str, Mapping[int, bool]] = {}
    options = {} if capacity is None else {"capacity": capacity}
    if capacity is not None:
        subject.make_small(capacity)
    for kill in range(kills):
        name = f"kill {kill} {capacity}"
        # Uniform in its logarithm: half of the kills fall into the first 14 ms.
        after = 0.001 * 200 ** chance.random()
        acked[name] = await asyncio.to_thread(_run, subject, name, kill_after_s=after, **options)
        if kill % 10 == 9:
            await _expect_sound(subject, dict(list(acked.items())[-10:]), capacity)
    total = sum(map(len, acked.values()))
    demand(total, "no child acknowledged a single block before it was killed")


@check("crash", limit_s=1800)
async def killed_while_saving(subject: Subject) -> None:
    """A SIGKILL at any moment loses no acknowledged block; the others are right or absent."""
    await _kills(subject, None)


@check("crash", limit_s=1800)
async def killed_while_evicting(subject: Subject) -> None:
    """A SIGKILL of a process that fills a small store leaves every block right or absent."""
    await _kills(subject, 2 << 20)


@check("crash", limit_s=120)
async def killed_at_named_points(subject: Subject) -> None:
    """A SIGKILL at each named point of a save loses no acknowledged block."""
    subject.require("durable")
    if not subject.kill_points:
        raise Unsupported("the subject names no `kill_points`")
    for point in subject.kill_points:
        for visits in (1, 3):
            name = f"point {point} {visits}"
            acked = await asyncio.to_thread(
                _run, subject, name, point=point, visits=visits, capacity=1 << 20, count=400
            )
            demand(-1 not in acked, f"the point '{point}' was not reached {visits} times")
            await _expect_sound(subject, {name: acked}, 1 << 20)


@check("crash", limit_s=180)
async def stopped_process(subject: Subject) -> None:
    """A process that is stopped (SIGSTOP) in the middle of a save holds up no other for ever."""
    subject.require("shared")
    subject.require("durable")
    deadline_s = subject.patience_s
    work = {"name": "stopped", "nbytes": _NBYTES, "batch": _BATCH, "count": 4000}
    child = await asyncio.to_thread(lambda: children.start(subject, "save", **work))
    await asyncio.to_thread(_first_save, child)
    await asyncio.sleep(random.Random(subject.seed).uniform(0.02, 0.03))
    child.kill(signal.SIGSTOP)
    beside = "beside a stopped process"
    blocks = subject.blocks(beside)
    try:
        async with AsyncExitStack() as stack:
            # It may have been stopped while it held a lock that opening needs.
            opening = stack.enter_async_context(subject.guarded(deadline_s))
            store = await answer(opening, deadline_s, f"opening {beside}")
            if store is not None:
                keys = blocks.keys(count=4)
                await answer(store.save(blocks.chain(keys)), deadline_s, f"a save {beside}")
                await answer(store.lookup(keys), deadline_s, f"a lookup {beside}")
    finally:
        child.kill(signal.SIGKILL)
        await asyncio.to_thread(child.wait)
    async with subject.guarded(deadline_s) as store:
        keys = blocks.keys("after", count=4)
        demand(
            await store.save(blocks.chain(keys)) == 4, "a process that was stopped blocks others"
        )
