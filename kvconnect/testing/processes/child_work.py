"""The work of the kit's child processes. Each reports a step, as JSON, before the next one."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from kvconnect.backend import Backend, StoredBlock
from kvconnect.backends.registry import open_backend
from kvconnect.errors import RetryLater
from kvconnect.keys import BlockKey
from kvconnect.testing.blocks import BlockMaker
from kvconnect.testing.key_variants import digest
from kvconnect.testing.processes.usage import descriptors, resident_nbytes
from kvconnect.testing.subject import Subject

Tell: TypeAlias = Callable[[Mapping[str, Any]], None]


def chain_of(blocks: BlockMaker, start: int, count: int, nbytes: int) -> Sequence[StoredBlock]:
    """Returns blocks number `start` and on of one long chain."""
    keys = [blocks.key(number) for number in range(start, start + count)]
    return blocks.chain(keys, after=blocks.key(start - 1) if start else None, nbytes=nbytes)


def _store(subject: Subject, capacity: int | None) -> Backend:
    made = subject.make_backend() if capacity is None else subject.make_small(capacity)
    return subject.bare(made)


async def save(
    subject: Subject,
    tell: Tell,
    *,
    name: str,
    nbytes: int,
    batch: int,
    count: int,
    capacity: int | None = None,
    point: str | None = None,
    visits: int = 1,
) -> None:
    """Saves batches of one chain, and reports the result of each; dies at `point`."""
    blocks, store = subject.blocks(name), _store(subject, capacity)
    left = visits

    def at(reached: str) -> None:
        nonlocal left
        if reached == point:
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    subject.arm(store, at)
    await store.open([BlockMaker.layout])
    tell({"opened": True})
    for start in range(0, count, batch):
        stored = await store.save(chain_of(blocks, start, batch, nbytes))
        tell({"start": start, "stored": stored})
    await store.close()


async def read(subject: Subject, tell: Tell, *, name: str, nbytes: int, count: int) -> None:
    """Reports which blocks of a chain can be loaded, and how many are wrong."""
    blocks = subject.blocks(name)
    async with subject.opened() as store:
        for number in range(count):
            key = blocks.key(number)
            (into,) = blocks.buffers(1, nbytes)
            loaded = await store.load([key], [into])
            right = not loaded or blocks.holds(into, key, framed=False)
            tell({"number": number, "loaded": loaded, "right": right})


async def crowd(
    subject: Subject,
    tell: Tell,
    *,
    name: str,
    nbytes: int,
    count: int,
    lasts_s: float,
    seed: int,
) -> None:
    """Saves and reads the same blocks as other processes, repeatedly; reports wrong ones."""
    blocks, chance = subject.blocks(name), random.Random(seed)
    wrong = lost = 0
    saved: list[int] = []
    async with subject.opened() as store:
        end = time.monotonic() + lasts_s
        while time.monotonic() < end:
            for number in chance.sample(range(count), count):
                await store.save([blocks.block(blocks.key(number), nbytes=nbytes)])
                saved.append(number)
                read = chance.choice(saved)  # another process may be saving this one just now
                key = blocks.key(read)
                (into,) = blocks.buffers(1, nbytes)
                if await store.load([key], [into]):
                    wrong += not blocks.holds(into, key, framed=False)
                elif read:  # the first one is also deleted
                    lost += 1
            await store.delete([blocks.key(0)])
    tell({"wrong": wrong, "lost": lost})


async def grow(
    subject: Subject, tell: Tell, *, name: str, nbytes: int, batch: int, count: int, capacity: int
) -> None:
    """Saves many times the capacity, and reports the growth of this process's memory."""
    blocks = subject.blocks(name)
    async with subject.opened(subject.make_small(capacity)) as store:
        await store.save(chain_of(blocks, 0, batch, nbytes))
        before = resident_nbytes()
        for start in range(batch, count, batch):
            chain = chain_of(blocks, start, batch, nbytes)
            await store.save(chain)
            await store.load([one.key for one in chain], blocks.buffers(batch, nbytes))
        tell({"grew": resident_nbytes() - before})


async def limited(
    subject: Subject, tell: Tell, *, name: str, limit: int, count: int, directory: str | None = None
) -> None:
    """Saves to a disk without room, then with room again; reports the blocks each time."""
    blocks = subject.blocks(name)
    made = subject.make_in(Path(directory)) if directory else subject.make_backend()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    failed, saved, keys = 0, [], blocks.keys("limited", count=count)
    store = open_backend(subject.bare(made), deadline_s=10)
    try:
        await store.open([BlockMaker.layout])
    except RetryLater as error:
        tell({"opened": False, "why": str(error)[:200]})
        return
    for key in keys:
        try:
            saved += [key] * await store.save([blocks.block(key)])
        except RetryLater:
            failed += 1
    found = await _verify(blocks, store, saved, subject.patience_s)
    tell({"opened": True, "saved": len(saved), "failed": failed, **found})
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    await asyncio.sleep(0)
    again = 0
    end = time.monotonic() + subject.patience_s
    while not again and time.monotonic() < end:  # a store may look for room only now and then
        try:
            again = await store.save([blocks.block(blocks.key("again"))])
        except RetryLater:
            await asyncio.sleep(0.1)
    found = await _verify(blocks, store, [blocks.key("again")], subject.patience_s)
    tell({"again": again, **found})
    await store.close()


async def _verify(
    blocks: BlockMaker, store: Backend, keys: Sequence[BlockKey], within_s: float
) -> dict[str, int]:
    """Returns how many blocks can be loaded, and how many of them are wrong."""
    wrong = kept = 0
    end = time.monotonic() + within_s
    for key in keys:
        (into,) = blocks.buffers(1)
        while True:
            try:
                loaded = await store.load([key], [into])
                break
            except RetryLater:  # the circuit is open for a while after failures
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(0.1)
        kept += loaded
        wrong += loaded and not blocks.holds(into, key)
    return {"kept": kept, "wrong": wrong}


async def few_files(subject: Subject, tell: Tell, *, name: str) -> None:
    """Calls the store while no file descriptor is left, then with some again."""
    blocks = subject.blocks(name)
    keys = blocks.keys("files", count=4)
    async with subject.guarded() as store:
        await store.save(blocks.chain(keys))
    store = subject.make_guarded(5.0)
    await store.open([BlockMaker.layout])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 8, hard))
    held: list[int] = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    answers = []
    for call in (
        store.lookup(keys),
        store.load(keys, blocks.buffers(4)),
        store.save(blocks.chain(blocks.keys("more", count=2))),
    ):
        try:
            answers.append(str(await call))
        except RetryLater as error:
            answers.append(type(error).__name__)
    for fd in held:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    found = await _verify(blocks, store, keys, subject.patience_s)
    again = await store.save(blocks.chain(blocks.keys("again", count=2)))
    tell({"answers": answers, "again": again, **found})
    await store.close()


async def keys_of_everything(subject: Subject, tell: Tell) -> None:
    """Reports the digest of keys that were made in this process."""
    tell({"digest": digest()})
