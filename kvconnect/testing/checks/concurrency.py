"""Checks concurrent calls, calls in flight at the close, and leaks after it."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections.abc import Awaitable
from typing import TypeVar

from kvconnect.errors import BackendTimeout
from kvconnect.testing.check import Violation, check, demand
from kvconnect.testing.checks.contract import expect_stored
from kvconnect.testing.checks.faults import opened_first
from kvconnect.testing.faults.faulty_backend import FaultyBackend
from kvconnect.testing.processes import children
from kvconnect.testing.processes.usage import descriptors
from kvconnect.testing.subject import Subject, Unsupported

T = TypeVar("T")


# Threads of default executors, asyncio's and the kit's: they belong to the owner of the loop.
_LOOPS_OWN = ("asyncio", "kvconnect-main")


@check("contract")
async def concurrent_calls(subject: Subject) -> None:
    """Calls that run at once each get their own answer."""
    blocks = subject.blocks("concurrent")
    batches = [blocks.keys(number, count=5) for number in range(16)]
    async with subject.opened() as store:
        saved = await asyncio.gather(*(store.save(blocks.chain(keys)) for keys in batches))
        demand(set(saved) == {5}, f"16 saves of 5 blocks at once said {saved}")
        into = [blocks.buffers(5) for _ in batches]
        loaded = await asyncio.gather(
            *(store.load(keys, buffers) for keys, buffers in zip(batches, into, strict=True))
        )
        demand(set(loaded) == {5}, f"16 loads of 5 blocks at once said {loaded}")
        for keys, buffers in zip(batches, into, strict=True):
            demand(all(map(blocks.holds, buffers, keys)), "a load got what belongs to another one")


@check("contract")
async def races(subject: Subject) -> None:
    """Loads that race saves and deletes of the same keys are right or misses."""
    chance = random.Random(subject.seed)
    async with subject.prepared("race", 24) as (store, blocks, keys):

        async def write() -> None:
            for key in chance.choices(keys, k=60):
                await store.save([blocks.block(key)])

        async def drop() -> None:
            for key in chance.choices(keys, k=60):
                await store.delete([key])
                await asyncio.sleep(0)  # a store that never waits must not do all at once

        async def read() -> None:
            for key in chance.choices(keys, k=60):
                (into,) = blocks.buffers(1)
                if await store.load([key], [into]):
                    demand(blocks.holds(into, key), "a load that raced a save or delete is wrong")

        await asyncio.gather(write(), write(), drop(), read(), read(), read())
        await store.save([blocks.block(key) for key in keys])
        await expect_stored(store, blocks, keys)


@check("contract")
async def races_with_eviction(subject: Subject) -> None:
    """Loads that race the eviction of what they load are right or misses."""
    async with subject.prepared("eviction race", 60, slots=12) as (store, blocks, keys):

        async def write() -> None:
            for start in range(0, 60, 4):
                await store.save(blocks.chain(keys[start : start + 4]))

        async def read(step: int) -> None:
            for key in keys[::step]:
                (into,) = blocks.buffers(1)
                if await store.load([key], [into]):
                    demand(blocks.holds(into, key), "a load that raced an eviction is wrong")

        await asyncio.gather(write(), write(), read(1), read(2), read(3))


@check("contract")
async def buffers_are_left_alone(subject: Subject) -> None:
    """A load that has returned or raised never writes to its buffers any more."""
    async with subject.prepared("left alone", 4) as (store, blocks, keys):
        await store.save(blocks.chain(keys))
        into = blocks.buffers(5)
        await store.load([*keys, blocks.key("absent")], into)
        for buffer in into:
            buffer.fill_(0xC5)
        for _ in range(3):
            await store.lookup(keys)
            await asyncio.sleep(0.02)
        demand(all(map(blocks.untouched, into)), "a buffer was written to after its load ended")
    demand(all(map(blocks.untouched, into)), "a buffer was written to while the store closed")


@check("contract")
async def cancelled_loads(subject: Subject) -> None:
    """A load that is cancelled at any moment ends, and never writes to its buffers after that."""
    if not subject.ends_cancelled:
        raise Unsupported("`ends_cancelled` is not set: the framework cancels no load")
    async with subject.prepared("cancelled", 4) as (store, blocks, keys):
        nbytes = min(1 << 20, store.capabilities.max_value_bytes or 1 << 20)
        await store.save(blocks.chain(keys, nbytes=nbytes))
        start = time.monotonic()
        await store.load(keys, blocks.buffers(4, nbytes))
        took = time.monotonic() - start
        returned = []
        for turn in range(8):
            into = blocks.buffers(4, nbytes)
            loading = asyncio.ensure_future(store.load(keys, into))
            await asyncio.wait([loading], timeout=took * turn / 8)
            loading.cancel()
            await _within(asyncio.wait([loading]), subject.patience_s, "a cancelled load")
            for buffer in into:
                buffer.fill_(0xC5)
            returned += into
        await asyncio.sleep(min(2 * took, subject.patience_s / 10))
        await expect_stored(store, blocks, keys, nbytes=nbytes)
        demand(all(map(blocks.untouched, returned)), "a cancelled load wrote after its end")
    demand(all(map(blocks.untouched, returned)), "a cancelled load wrote while the store closed")


@check("contract")
async def buffers_come_back_once(subject: Subject) -> None:
    """Each lent buffer comes back exactly once: after success, miss, error, timeout and close."""
    blocks = subject.blocks("come back")
    keys = blocks.keys(count=1)
    faulty = FaultyBackend(subject.bare(subject.make_backend()))
    async with opened_first(subject, subject.deadline_s, faulty) as store:
        pending = []
        faulty.set("hang")
        buffers = blocks.buffers(3)
        calls = [store.load(keys, [into]) for into in buffers]
        for into, error in zip(
            buffers, await asyncio.gather(*calls, return_exceptions=True), strict=True
        ):
            if not isinstance(error, BackendTimeout):
                raise Violation(f"a load of a store that hangs ended with {error!r}")
            demand(error.pending is not None, "a load past its deadline keeps its buffers")
            if error.pending is not None:
                demand(not error.pending.done(), "the buffers of a load that runs came back")
                pending.append((error.pending, into))
        faulty.heal()
        for future, into in pending:
            await asyncio.wait_for(asyncio.wrap_future(future), subject.patience_s)
            demand(blocks.margins_whole(into), "a load past its deadline wrote beside its buffer")


@check("contract")
async def close_in_flight(subject: Subject) -> None:
    """A ``close()`` returns with calls in flight, and each of them ends; twice is no error."""
    blocks = subject.blocks("closing")
    patience_s = subject.patience_s
    store = subject.bare(subject.make_backend())
    await store.open([blocks.layout])
    saving = asyncio.ensure_future(store.save(blocks.chain(blocks.keys(count=64))))
    loading = asyncio.ensure_future(store.load(blocks.keys(count=1), blocks.buffers(1)))
    await asyncio.sleep(0)
    await _within(store.close(), patience_s, "close() with calls in flight")
    await _within(store.close(), patience_s, "the second close()")
    ended = asyncio.gather(saving, loading, return_exceptions=True)
    for result in await _within(ended, patience_s, "a call that close() found in flight"):
        if isinstance(result, BaseException) and not isinstance(result, Exception):
            raise Violation(f"a call in flight ended with {result!r}")


async def _within(work: Awaitable[T], seconds: float, what: str) -> T:
    try:
        return await asyncio.wait_for(work, seconds)
    except TimeoutError as error:
        raise Violation(f"{what} did not end within {seconds:g} s") from error


@check("contract")
async def open_again(subject: Subject) -> None:
    """A second backend on the same medium opens and works after ``close()``."""
    blocks = subject.blocks("open again")
    for turn in range(3):
        async with subject.opened() as store:
            key = blocks.key(turn)
            demand(await store.save([blocks.block(key)]) == 1, "a store opened again saves nothing")
            await expect_stored(store, blocks, [key])


@check("contract")
async def nothing_is_left(subject: Subject) -> None:
    """A closed store leaves no thread, task or file descriptor."""
    blocks = subject.blocks("left")
    closed = []  # keeps them from garbage collection, which would release what close() left

    async def use(turn: int) -> None:
        async with subject.opened() as store:
            closed.append(store)
            keys = blocks.keys(turn, count=20)
            await store.save(blocks.chain(keys))
            await store.load(keys, blocks.buffers(20))
            await store.load([blocks.key("absent")], blocks.buffers(1))
            await store.delete(keys)

    await use(0)
    gc.collect()
    threads, files = set(threading.enumerate()), descriptors()
    for turn in range(1, 4):
        await use(turn)

    def left_threads() -> list[str]:
        new = set(threading.enumerate()) - threads
        return [thread.name for thread in new if not thread.name.startswith(_LOOPS_OWN)]

    end = time.monotonic() + subject.patience_s / 5
    # Threads of executors and transports that were closed end a moment later.
    for _ in range(100):
        if not (_tasks() or left_threads() or descriptors() > files) or time.monotonic() > end:
            break
        await asyncio.sleep(0.01)
    gc.collect()
    left = left_threads()
    demand(not left, f"threads are left: {', '.join(left)}")
    demand(not _tasks(), f"tasks are left: {', '.join(map(repr, _tasks()))}")
    demand(descriptors() <= files, f"{descriptors() - files} file descriptors are left")


def _tasks() -> set[asyncio.Task[object]]:
    current = asyncio.current_task()
    return {task for task in asyncio.all_tasks() if task is not current}


@check("contract")
async def loop_stays_free(subject: Subject) -> None:
    """Calls never block the event loop: others continue while large blocks move."""
    blocks = subject.blocks("free loop")
    worst = [0.0]

    async def beat() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            worst[0] = max(worst[0], time.monotonic() - before - 0.01)

    async with subject.opened() as store:
        for attempt in range(3):  # a busy machine may stop this process once, not three times
            worst[0] = 0.0
            beating = asyncio.create_task(beat())
            keys = blocks.keys(attempt, count=4)
            longest = store.capabilities.max_value_bytes or (2 << 20)
            nbytes = min(2 << 20, longest)
            await store.save([blocks.block(key, nbytes=nbytes) for key in keys])
            await store.lookup(keys)
            await store.load(keys, blocks.buffers(4, nbytes))
            await store.delete(keys)
            await asyncio.sleep(0.02)
            beating.cancel()
            if worst[0] < subject.patience_s / 10:
                return
    raise Violation(f"the event loop stood still for {worst[0]:.1f} s during a call")


@check("contract", limit_s=180)
async def two_processes(subject: Subject) -> None:
    """Processes that write and read the same keys at once only ever see whole, right values."""
    subject.require("shared")
    name = "two processes"
    arguments = {"name": name, "nbytes": 64 << 10, "count": 6, "lasts_s": 0.7}

    def run() -> list[children.Told]:
        both = [children.start(subject, "crowd", seed=n, **arguments) for n in range(2)]
        return [told for child in both for told in child.wait()]

    for told in await asyncio.to_thread(run):
        wrong, lost = told["wrong"], told["lost"]
        demand(not wrong, f"{wrong} loads while another process wrote the same key were wrong")
        demand(not lost, f"{lost} loads found nothing, for another process wrote the same key")
    blocks = subject.blocks(name)
    async with subject.opened() as store:
        keys = [blocks.key(number) for number in range(1, 6)]
        await expect_stored(store, blocks, keys, nbytes=64 << 10)


@check("contract", limit_s=180)
async def processes_see_each_other(subject: Subject) -> None:
    """The blocks that one process saves are found by another at once; deleted ones are gone."""
    subject.require("shared")
    name, nbytes = "see each other", 8192
    blocks = subject.blocks(name)
    async with subject.opened() as store:

        def told(work: str, **arguments: int) -> list[children.Told]:
            return children.start(subject, work, name=name, nbytes=nbytes, **arguments).wait()

        await asyncio.to_thread(told, "save", batch=4, count=4)
        await expect_stored(store, blocks, [blocks.key(n) for n in range(4)], nbytes=nbytes)
        await store.delete([blocks.key(3)])
        seen = await asyncio.to_thread(told, "read", count=4)
        loaded = [one["loaded"] for one in seen]
        demand(loaded == [1, 1, 1, 0], f"another process sees {loaded}, not [1, 1, 1, 0]")
        demand(all(one["right"] for one in seen), "another process read a wrong block")
