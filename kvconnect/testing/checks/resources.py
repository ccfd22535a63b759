"""Checks a store when a resource runs out, fails, or disappears."""

from __future__ import annotations

import asyncio
import errno
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvconnect.backends.guard.store import GuardedBackend
from kvconnect.errors import KvConnectError
from kvconnect.testing.blocks import BlockMaker
from kvconnect.testing.check import check, demand
from kvconnect.testing.checks.contract import expect_stored
from kvconnect.testing.checks.faults import answer, recovers
from kvconnect.testing.faults.faulty_filesystem import (
    FaultyFilesystem,
    FileOperation,
    SmallFilesystem,
)
from kvconnect.testing.processes import children
from kvconnect.testing.subject import Subject, Unsupported

_DEADLINE_S = 5.0


@asynccontextmanager
async def _shimmed(
    subject: Subject, name: str
) -> AsyncIterator[tuple[GuardedBackend, FaultyFilesystem, BlockMaker]]:
    directory = subject.directory
    if directory is None:
        raise Unsupported("the subject has no `directory`: it keeps no files that could fail")
    with FaultyFilesystem(directory) as files:
        async with subject.guarded(_DEADLINE_S) as store:
            yield store, files, subject.blocks(name)


async def _calls(store: GuardedBackend, blocks: BlockMaker, what: str) -> None:
    """Makes some calls with the fault set: clear results in time, no wrong or partial block."""
    for turn in range(3):
        old, new = blocks.keys("old", count=4), blocks.keys(what, turn, count=4)
        into = blocks.buffers(4)
        loaded = await answer(store.load(old, into), _DEADLINE_S, f"{what}: load")
        demand(all(map(blocks.holds, into, old[: loaded or 0])), f"{what}: a loaded block is wrong")
        await answer(store.save(blocks.chain(new)), _DEADLINE_S, f"{what}: save")
        await answer(store.lookup(old + new), _DEADLINE_S, f"{what}: lookup")


async def _fails(subject: Subject, operation: FileOperation, number: int) -> None:
    what = f"{operation} fails with {errno.errorcode[number]}"
    async with _shimmed(subject, what) as (store, files, blocks):
        old = blocks.keys("old", count=4)
        await store.save(blocks.chain(old))
        files.fail(operation, number)
        await _calls(store, blocks, what)
        if not files.hits:
            raise Unsupported(f"the store makes no {operation} that the shim sees")
        files.heal()
        await recovers(store, blocks, what, within_s=subject.patience_s)
        await _whole_or_absent(store, blocks, what)
        # The same blocks again: an earlier failure must not prevent the save.
        again = blocks.keys(what, 0, count=4)
        saved = await store.save(blocks.chain(again))
        demand(saved == 4, f"{what}: of 4 blocks that failed {saved} can be saved afterwards")
        await expect_stored(store, blocks, again)


async def _whole_or_absent(store: GuardedBackend, blocks: BlockMaker, what: str) -> None:
    for key in [*blocks.keys("old", count=4), *blocks.keys(what, 0, count=4)]:
        (into,) = blocks.buffers(1)
        # A damaged frame would be dropped and counted; here none may be.
        found = await store.lookup([key])
        loaded = await store.load([key], [into])
        demand(loaded == found, f"{what}: a block is found that cannot be loaded: half written?")
        demand(not loaded or blocks.holds(into, key), f"{what}: a block is wrong afterwards")


@check("resources")
async def failing_read(subject: Subject) -> None:
    """Errors (EIO) at reads: calls end clearly and in time, and the store works again later."""
    await _fails(subject, "read", errno.EIO)


@check("resources")
async def failing_write(subject: Subject) -> None:
    """Errors (EIO) at writes: a block is whole or absent, and the store works again afterwards."""
    await _fails(subject, "write", errno.EIO)


@check("resources")
async def no_space_at_write(subject: Subject) -> None:
    """Errors (ENOSPC) at writes: a block is whole or absent, and the store works again later."""
    await _fails(subject, "write", errno.ENOSPC)


@check("resources")
async def failing_open(subject: Subject) -> None:
    """Errors (EIO) at opening files: calls end clearly, and the store works again afterwards."""
    await _fails(subject, "open", errno.EIO)


@check("resources")
async def interrupted(subject: Subject) -> None:
    """Interrupts (EINTR) at reads and writes: results are right, or clear errors."""
    async with _shimmed(subject, "interrupted") as (store, files, blocks):
        await store.save(blocks.chain(blocks.keys("old", count=4)))
        for operation in ("read", "write"):
            files.fail(operation, errno.EINTR, times=1)
            await _calls(store, blocks, f"an interrupted {operation}")
        if not files.hits:
            raise Unsupported("the store makes no read or write that the shim sees")
        files.heal()
        await recovers(store, blocks, "interrupted", within_s=subject.patience_s)


@check("resources")
async def short_transfers(subject: Subject) -> None:
    """Reads and writes that move fewer bytes than requested are continued."""
    async with _shimmed(subject, "short") as (store, files, blocks):
        files.short("write")
        keys = blocks.keys(count=6)
        saved = await store.save(blocks.chain(keys))
        demand(saved == 6, f"with short writes, save stored {saved} of 6 blocks")
        files.heal()
        files.short("read")
        into = blocks.buffers(6)
        loaded = await store.load(keys, into)
        demand(loaded == 6, f"with short writes and reads, load filled {loaded} of 6 blocks")
        demand(all(map(blocks.holds, into, keys)), "a block is wrong after a short read or write")
        if not files.hits:
            raise Unsupported("the store makes no read or write that the shim sees")


@check("resources", limit_s=180)
async def limited_file_size(subject: Subject) -> None:
    """A store without room (``RLIMIT_FSIZE``) gives clear results; with room again, saves work."""
    if subject.directory is None:
        raise Unsupported("the subject has no `directory`: it keeps no files that could be full")
    limit = 24 * BlockMaker.frame_nbytes
    work = {"name": "file size", "limit": limit, "count": 40}
    told = await asyncio.to_thread(lambda: children.start(subject, "limited", **work).wait())
    if not told[0]["opened"]:
        return  # it reports that when it is opened, which is clear
    first, then = told
    demand(not first["wrong"], f"{first['wrong']} blocks are wrong on a disk without room")
    demand(first["kept"] == first["saved"], f"{first['saved']} saved, {first['kept']} are there")
    demand(then["again"] == 1, "with room again, a save stores nothing")
    demand((then["kept"], then["wrong"]) == (1, 0), "with room again, a load finds nothing right")


@check("resources", needs_root=True)
async def full_filesystem(subject: Subject) -> None:
    """A file system that fills up: saves store fewer, and all stored blocks are right."""
    blocks = subject.blocks("small tmpfs")
    with SmallFilesystem(3 << 20) as small:
        store = subject.bare(subject.make_in(small.path / "store"))
        async with subject.guarded(_DEADLINE_S, store) as guarded:
            kept = 0
            for batch in range(20):
                keys = blocks.keys(batch, count=20)
                saved = await answer(guarded.save(blocks.chain(keys)), _DEADLINE_S, "a full disk")
                into = blocks.buffers(saved or 0)
                loaded = await guarded.load(keys[: saved or 0], into)
                demand(loaded == (saved or 0), f"full disk: {saved} saved, {loaded} can be loaded")
                demand(all(map(blocks.holds, into, keys[:loaded])), "full disk: a block is wrong")
                kept += loaded
            demand(kept, "nothing at all could be stored on 3 MiB")


@check("resources", needs_root=True)
async def read_only_filesystem(subject: Subject) -> None:
    """A read-only file system: blocks can be loaded, and saves store nothing without harm."""
    blocks = subject.blocks("read only")
    keys, more = blocks.keys(count=4), blocks.keys("more", count=2)
    with SmallFilesystem(8 << 20) as small:
        async with subject.guarded(_DEADLINE_S, subject.make_in(small.path / "store")) as store:
            await store.save(blocks.chain(keys))
        small.make_read_only()
        async with subject.guarded(_DEADLINE_S, subject.make_in(small.path / "store")) as store:
            into = blocks.buffers(4)
            loaded = await store.load(keys, into)
            demand(loaded == 4, f"read-only: load filled {loaded} of 4 blocks")
            demand(all(map(blocks.holds, into, keys)), "read-only: a block is wrong")
            saved = await answer(store.save(blocks.chain(more)), _DEADLINE_S, "read-only: save")
            demand(not saved, f"read-only: save says {saved}")
            demand(await store.lookup(more) == 0, "read-only: a block that was not saved is found")


@check("resources", limit_s=180)
async def no_descriptors(subject: Subject) -> None:
    """A process without file descriptors: calls end clearly; with some again, all calls work."""
    told = await asyncio.to_thread(
        lambda: children.start(subject, "few_files", name="descriptors").wait()
    )
    (result,) = told
    demand(not result["wrong"], f"{result['wrong']} blocks are wrong after EMFILE")
    if subject.capabilities().durable:
        demand(result["kept"] == 4, f"after EMFILE {result['kept']} of 4 blocks are there")
    demand(result["again"] == 2, f"after EMFILE save stored {result['again']} of 2 blocks")


@check("resources")
async def vanished_directory(subject: Subject) -> None:
    """A directory removed while it is used costs its blocks only; made again, it works."""
    directory = subject.directory
    if directory is None:
        raise Unsupported("the subject has no `directory` that could vanish")
    blocks = subject.blocks("vanished")
    keys = blocks.keys(count=4)
    async with subject.guarded(_DEADLINE_S) as store:
        await store.save(blocks.chain(keys))
        shutil.rmtree(directory)
        found = await answer(store.lookup(keys), _DEADLINE_S, "vanished directory: lookup")
        loaded = await answer(store.load(keys, blocks.buffers(4)), _DEADLINE_S, "vanished: load")
        demand(not loaded, "blocks of a directory that is gone are loaded")
        demand(not found or loaded is None, "blocks of a directory that is gone are found")
        await answer(store.save(blocks.chain(keys)), _DEADLINE_S, "vanished directory: save")
        directory.mkdir(parents=True, exist_ok=True)
        await recovers(store, blocks, "vanished directory", within_s=subject.patience_s)


@check("resources")
async def capacity(subject: Subject) -> None:
    """A bounded store that is filled ten times over never holds more than its capacity."""
    blocks = subject.blocks("capacity")
    limit = 40 * blocks.frame_nbytes
    async with subject.opened(subject.make_small(limit)) as store:
        for turn in range(50):
            keys = blocks.keys(turn, count=8)
            saved = await store.save(blocks.chain(keys))
            demand(saved == 8, f"a full store stored {saved} of 8 new blocks: it must make room")
            usage = await subject.usage(store)
            most = limit + blocks.frame_nbytes
            demand(usage.found <= most, f"{usage.found:.0f} bytes are there, {limit} may be")
            demand(usage.claimed <= most, f"it says it uses {usage.claimed:.0f} of {limit} bytes")
        await expect_stored(store, blocks, keys)


@check("resources", limit_s=180)
async def capacity_of_several(subject: Subject) -> None:
    """A bounded store filled by three processes stays within its capacity, a block each."""
    subject.require("shared")
    nbytes = 64 << 10
    limit = 48 * nbytes
    work = {"nbytes": nbytes, "batch": 4, "count": 96, "capacity": limit}
    found: list[float] = []
    async with subject.opened(subject.make_small(limit)) as store:
        await subject.usage(store)

        def run() -> None:
            crowd = [
                children.start(subject, "save", name=f"crowd {number}", **work)
                for number in range(3)
            ]
            for child in crowd:
                for _ in child.listen():
                    usage = asyncio.run_coroutine_threadsafe(subject.usage(store), loop).result(30)
                    found.append(usage.found)

        loop = asyncio.get_running_loop()
        await asyncio.to_thread(run)
    most = limit + 3 * nbytes
    demand(max(found) <= most, f"{max(found):.0f} bytes were there, {limit} may be")


@check("resources")
async def too_large(subject: Subject) -> None:
    """A block that cannot fit is refused quickly, and no other block is dropped for it."""
    async with subject.prepared("too large", 80, slots=40) as (store, blocks, keys):
        try:
            huge = blocks.block(blocks.key("huge"), nbytes=80 * blocks.frame_nbytes)
            saved = await asyncio.wait_for(store.save([huge]), _DEADLINE_S)
            demand(saved == 0, "a block larger than the store was stored, it says")
        except KvConnectError:
            pass
        demand(
            await store.lookup([blocks.key("huge")]) == 0, "a block larger than the store is found"
        )
        saved = await asyncio.wait_for(store.save(blocks.chain(keys)), _DEADLINE_S)
        demand(0 < saved <= 41, f"of a chain twice as long as the store, save stored {saved}")
        found = await store.lookup(keys)
        demand(
            found == saved, f"of a chain twice as long as the store {saved} saved, {found} found"
        )


@check("resources", limit_s=180)
async def memory_is_bounded(subject: Subject) -> None:
    """The process stays within a bounded store's capacity after ten times as much traffic."""
    limit, nbytes = 8 << 20, 256 << 10
    work = {"name": "memory", "nbytes": nbytes, "batch": 4, "count": 400, "capacity": limit}
    subject.make_small(limit)
    told = await asyncio.to_thread(lambda: children.start(subject, "grow", **work).wait())
    grew, most = told[0]["grew"], limit + (40 << 20)
    demand(grew <= most, f"100 MiB through a store of 8 MiB: the process grew by {grew >> 20} MiB")
