"""Backends that are wrong in one way each, and what is right to compare them with.

Child processes import this file, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import ClassVar

import torch

from kvconnect.backend import Backend, Capabilities
from kvconnect.backends import GuardedBackend
from kvconnect.backends.disk.store import DiskBackend
from kvconnect.backends.lanes import Lane
from kvconnect.backends.memory.store import MemoryBackend
from kvconnect.errors import BackendTimeout, BackendUnavailable
from kvconnect.testing.subject import Subject, Usage, open_while
from kvconnect.testing.subjects import DiskSubject, MemorySubject

# ---------------------------------------------------------------------------------------- memory


class DropsLastByte(MemoryBackend):
    async def load(self, keys, into):
        loaded = await super().load(keys, into)
        for buffer in into[:loaded]:
            if buffer.numel() % 4096:
                buffer[-1] = 0
        return loaded


class OnlySixteenMiB(MemoryBackend):
    async def save(self, blocks):
        return await super().save(blocks) if blocks[0].data.numel() <= 16 << 20 else 0


class OneSizePerBatch(MemoryBackend):
    async def load(self, keys, into):
        same = [b for b in into if b.numel() == into[0].numel()] if into else []
        return await super().load(keys[: len(same)], into[: len(same)])


class ShortBatches(MemoryBackend):
    async def lookup(self, keys):
        return await super().lookup(keys[:512])


class WedgesAfterMiss(MemoryBackend):
    missed = False

    async def load(self, keys, into):
        if self.missed:
            await asyncio.Event().wait()
        loaded = await super().load(keys, into)
        self.missed = loaded < len(keys)
        return loaded


class NeedsOneKey(MemoryBackend):
    async def lookup(self, keys):
        min(keys)
        return await super().lookup(keys)


class CountsAll(MemoryBackend):
    async def lookup(self, keys):
        return sum([await super(CountsAll, self).lookup([key]) for key in keys])


class WritesBeyond(MemoryBackend):
    async def load(self, keys, into):
        loaded = await super().load(keys, into)
        for buffer in into[loaded : loaded + 1]:
            buffer.zero_()
        return loaded


class SaysWhatIsThere(MemoryBackend):
    async def load(self, keys, into):
        await super().load(keys, into)
        return await self.lookup(keys)


class CountsNewOnes(MemoryBackend):
    async def save(self, blocks):
        present = [await self.lookup([block.key]) for block in blocks]
        return await super().save(blocks) - sum(present)


class CountsKeys(MemoryBackend):
    async def save(self, blocks):
        await super().save(blocks)
        return len({block.key for block in blocks})


class DeleteRaises(MemoryBackend):
    async def delete(self, keys):
        for key in keys:
            if not await self.lookup([key]):
                raise KeyError(key)
        await super().delete(keys)


class ScrubsTooMuch(MemoryBackend):
    async def scrub(self):
        await self.delete([entry.key async for entry in self.scan()])
        return False


class DictBackend(Backend):
    """Right, apart from what its subclasses do."""

    def __init__(self, capacity=1 << 30):
        self.values = {}

    async def lookup(self, keys):
        return next((n for n, key in enumerate(keys) if key not in self.values), len(keys))

    async def load(self, keys, into):
        for number, (key, buffer) in enumerate(zip(keys, into, strict=True)):
            value = self.values.get(key)
            if value is None or len(value) != len(buffer):
                return number
            buffer.copy_(value)
        return len(keys)

    async def save(self, blocks):
        self.values.update((block.key, block.data.clone()) for block in blocks)
        return len(blocks)

    async def delete(self, keys):
        for key in keys:
            self.values.pop(key, None)


class KeepsBuffers(DictBackend):
    async def save(self, blocks):
        self.values.update((block.key, block.data) for block in blocks)
        return len(blocks)


class SpoilsInput(MemoryBackend):
    async def save(self, blocks):
        saved = await super().save(blocks)
        for block in blocks:
            block.data[:256].zero_()
        return saved


class NeedsTokens(MemoryBackend):
    async def save(self, blocks):
        whole = [b for b in blocks if b.tokens is None or len(b.tokens)]
        return await super().save(blocks) if len(whole) == len(blocks) else 0


class NeedsLayouts(MemoryBackend):
    async def open(self, layouts, access="store"):
        await super().open([layouts[0]])


class OneCallAtATime(MemoryBackend):
    async def load(self, keys, into):
        self.into = into
        await asyncio.sleep(0)
        return await super().load(keys, self.into)


class ReusesPlaces(DictBackend):
    """Without a lock: what is deleted or evicted is overwritten while it is copied."""

    def __init__(self, capacity=1 << 30):
        super().__init__()
        self.most, self.free = capacity // 12288, []

    async def load(self, keys, into):
        for number, (key, buffer) in enumerate(zip(keys, into, strict=True)):
            value = self.values.get(key)
            if value is None:
                return number
            for start in range(0, len(buffer), 3072):
                buffer[start : start + 3072].copy_(value[start : start + 3072])
                await asyncio.sleep(0)
        return len(keys)

    async def save(self, blocks):
        for block in blocks:
            if len(self.values) >= self.most:
                await self.delete([next(iter(self.values))])
            place = self.free.pop() if self.free else torch.empty_like(block.data)
            self.values.setdefault(block.key, place.copy_(block.data))
            await asyncio.sleep(0)
        return len(blocks)

    async def delete(self, keys):
        self.free += [self.values.pop(key) for key in keys if key in self.values]


class WritesLater(MemoryBackend):
    async def load(self, keys, into):
        loaded = await super().load(keys, into)
        asyncio.get_running_loop().call_later(0.01, into[0].zero_)
        return loaded


class LeavesItsThread(DictBackend):
    """Its thread goes on when the load is cancelled."""

    def fill(self, keys, into):
        for key, buffer in zip(keys, into, strict=True):
            time.sleep(0.01)
            buffer.copy_(self.values[key])
        return len(keys)

    async def load(self, keys, into):
        return await asyncio.to_thread(self.fill, keys, into)


class EndsCancelled(MemorySubject):
    ends_cancelled = True

    def make_backend(self):
        return LeavesItsThread()


class CloseWaits(MemoryBackend):
    running = 0

    async def save(self, blocks):
        self.running += 1
        await asyncio.sleep(0)
        return await super().save(blocks)

    async def close(self):
        if self.running:
            await asyncio.Event().wait()
        await super().close()


class OpensOnce(MemoryBackend):
    opened: ClassVar = []

    async def open(self, layouts, access="store"):
        self.opened.append(self)
        if len(self.opened) > 1:
            raise OSError("is open already")
        await super().open(layouts)


class LeavesThread(MemoryBackend):
    async def open(self, layouts, access="store"):
        threading.Thread(target=time.sleep, args=[5], daemon=True, name="left").start()
        await super().open(layouts)


class LeavesLane(MemoryBackend):
    """Its threads end only with the store's memory."""

    async def open(self, layouts, access="store"):
        self.lane = Lane("left", threads=1)
        await super().open(layouts)


class LeavesTask(MemoryBackend):
    async def open(self, layouts, access="store"):
        self.task = asyncio.create_task(asyncio.sleep(60))
        await super().open(layouts)


class LeavesFile(MemoryBackend):
    held: ClassVar = []

    async def open(self, layouts, access="store"):
        self.held.append(os.open("/dev/null", os.O_RDONLY))
        await super().open(layouts)


class BlocksTheLoop(MemoryBackend):
    async def lookup(self, keys):
        time.sleep(0.3)  # noqa: ASYNC251 - this is what is wrong with it
        return await super().lookup(keys)


# ---------------------------------------------------------------------------------------- declared


class ScansTwice(MemoryBackend):
    async def scan(self):
        for _ in range(2):
            async for entry in super().scan():
                yield entry


class MixesTokens(MemoryBackend):
    async def children(self, key):
        found = await super().children(key)
        return [type(c)(c.key, found[0].tokens) for c in found]


class ForgetsTheLast(MemoryBackend):
    async def children(self, key):
        found = await super().children(key)
        return found if len(found) < 10 else found[1:]


class NeverCountsDown(MemoryBackend):
    most = 0

    async def stats(self):
        stats = await super().stats()
        self.most = max(self.most, stats["blocks"])
        return {**stats, "blocks": self.most}


class RemembersLookups(MemoryBackend):
    """With a cache of what was found, which never forgets."""

    found = frozenset()

    async def lookup(self, keys):
        unknown = next((n for n, key in enumerate(keys) if key not in self.found), len(keys))
        more = await super().lookup(keys[unknown:])
        self.found = self.found.union(keys[: unknown + more])
        return unknown + more


class FirstInFirstOut(DictBackend):
    """Drops what was stored longest ago: the beginnings of chains."""

    def __init__(self, capacity=1 << 30):
        super().__init__()
        self.capacity = capacity

    async def save(self, blocks):
        for block in blocks:
            self.values.setdefault(block.key, block.data.clone())
            while sum(map(len, self.values.values())) > self.capacity:
                del self.values[next(iter(self.values))]
        return len(blocks)


# ---------------------------------------------------------------------------------------- pins


class PinsWhatIsAbsent(MemoryBackend):
    async def pin(self, keys, until):
        await super().pin(keys, until)
        return [True] * len(keys)


class PinsInWords(MemoryBackend):
    async def pin(self, keys, until):
        return [entry is not None for entry in await self.describe(keys)]


class PinsForEver(MemoryBackend):
    async def pin(self, keys, until):
        return await super().pin(keys, None if until is None else inf)


class PinsAll(MemoryBackend):
    def __init__(self, capacity):
        super().__init__(capacity, pin_fraction=1.0)


class ExpiresWhilePinned(DiskSubject):
    class Store(DiskBackend):
        async def lookup(self, keys):
            entries = await self.describe(keys)
            old = time.time() - 60
            return next(
                (n for n, one in enumerate(entries) if one is None or one.created_at < old),
                len(keys),
            )

    def make_expiring(self, ttl_s):
        return self.Store(self.directory, capacity=1 << 30, ttl=ttl_s)


class IgnoresTheTtlOfBlocks(MemoryBackend):
    async def save(self, blocks):
        return await super().save([replace(one, expires_at=None) for one in blocks])


class PinsUntilItCloses(DiskSubject):
    class Store(DiskBackend):
        async def close(self):
            with contextlib.suppress(BackendUnavailable):
                await self.pin([entry.key async for entry in self.scan()], None)
            await super().close()

    def make_backend(self):
        return self.Store(self.directory, capacity=1 << 30)


# ---------------------------------------------------------------------------------------- keys


class SaysYes(MemoryBackend):
    async def lookup(self, keys):
        return len(keys)


class Renames(DictBackend):
    """Changes keys in a way that makes two of them one."""

    @staticmethod
    def name(key):
        return key

    async def lookup(self, keys):
        return await super().lookup([self.name(key) for key in keys])

    async def load(self, keys, into):
        return await super().load([self.name(key) for key in keys], into)

    async def save(self, blocks):
        for block in blocks:
            self.values.setdefault(self.name(block.key), block.data.clone())
        return len(blocks)

    async def delete(self, keys):
        await super().delete([self.name(key) for key in keys])


class DeletesEqualContent(DictBackend):
    async def delete(self, keys):
        for key in keys:
            value = self.values.pop(key, None)
            same = [
                k for k, v in self.values.items() if value is not None and torch.equal(v, value)
            ]
            for other in same:
                del self.values[other]


# ---------------------------------------------------------------------------------------- guards


class Unguarded(MemorySubject):
    """Without what stands around a backend."""

    def guarded(self, deadline_s=10.0, backend=None):
        return self.opened(backend)

    def bare(self, backend):
        return backend


class Unchecked(MemorySubject):
    """Frames are not checked."""

    def guarded(self, deadline_s=10.0, backend=None):
        made = backend or self.make_backend()
        return open_while(GuardedBackend(made, deadline_s=deadline_s, verify_frames=False))


class ShiftsShortOnes(MemoryBackend):
    """The rest of a buffer that is too long is filled from its beginning."""

    async def load(self, keys, into):
        loaded = await super().load(keys, into)
        for buffer in into[:loaded]:
            if buffer[-1] == 0xC5:
                buffer[: buffer.numel() // 2] = 1
        return loaded


class UncheckedShort(Unchecked):
    def make_backend(self):
        return ShiftsShortOnes(64 << 20)


class CutsLongOnes(DictBackend):
    async def load(self, keys, into):
        for key, buffer in zip(keys, into, strict=True):
            buffer.copy_(self.values[key][: len(buffer)])
        return len(keys)


class CutsLong(MemorySubject):
    def make_backend(self):
        return CutsLongOnes()


class WithGuard(MemorySubject):
    """With a guard of its own."""

    guard = GuardedBackend

    def guarded(self, deadline_s=10.0, backend=None):
        return open_while(self.guard(backend or self.make_backend(), deadline_s=deadline_s))


class HandsBuffersOn(GuardedBackend):
    async def load(self, keys, into):
        try:
            return await super().load(keys, into)
        except BackendTimeout as error:
            done = type(error.pending)()
            done.set_result(None)
            raise BackendTimeout(str(error), done) from None


class WallClockDeadline(GuardedBackend):
    async def save(self, blocks):
        end = time.time() + 10
        saved = await super().save(blocks)
        if time.time() > end:
            raise BackendTimeout("too late", None)
        return saved


# ---------------------------------------------------------------------------------------- time


class ForgetsTtl(DiskSubject):
    def make_expiring(self, ttl_s):
        return DiskBackend(self.directory, capacity=1 << 30)


class ExpiresInADay(DiskSubject):
    def make_backend(self):
        return DiskBackend(self.directory, capacity=1 << 30, ttl=86400)


class ClockMustRise(MemoryBackend):
    last = 0.0

    async def save(self, blocks):
        before, self.last = self.last, time.time()
        return await super().save(blocks) if self.last >= before else 0


class StopsWhenTheClockJumps(MemoryBackend):
    last = None

    async def save(self, blocks):
        before, self.last = self.last, time.time()
        jumped = before is not None and abs(self.last - before) > 86400
        return 0 if jumped else await super().save(blocks)


# ---------------------------------------------------------------------------------------- files


class FileBackend(Backend):
    """A file per block. Right, apart from what its subclasses do."""

    capabilities = Capabilities(durable=True, shared=True)
    at = staticmethod(lambda point: None)

    def __init__(self, folder):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def path(self, key):
        return self.folder / key.hex()

    async def lookup(self, keys):
        return next((n for n, k in enumerate(keys) if not self.path(k).exists()), len(keys))

    async def load(self, keys, into):
        for number, (key, buffer) in enumerate(zip(keys, into, strict=True)):
            try:
                with self.path(key).open("rb") as file:
                    data = file.read()
            except FileNotFoundError:
                return number
            if len(data) != len(buffer):
                return number
            buffer.numpy().data[:] = data
        return len(keys)

    async def save(self, blocks):
        for block in blocks:
            self.folder.mkdir(parents=True, exist_ok=True)
            await self.write(block)
        return len(blocks)

    async def write(self, block):
        part = self.folder / f"part-{os.getpid()}"
        with part.open("wb") as file:
            file.write(block.data.numpy().data)
        part.replace(self.path(block.key))

    async def delete(self, keys):
        for key in keys:
            self.path(key).unlink(missing_ok=True)


class FileSubject(Subject):
    """Its `backend` is one of those here, in files."""

    backend = "FileBackend"
    kill_points = ("written",)

    def make_backend(self):
        return globals()[self.backend](self.directory)

    def make_small(self, capacity):
        return globals()[self.backend](self.directory.with_name("small"))

    def make_in(self, directory):
        return globals()[self.backend](directory)

    def arm(self, backend, at):
        backend.at = at

    async def usage(self, backend):
        named = [file.stat().st_size for file in self.files(backend) if len(file.name) == 64]
        return Usage(sum(named), sum(file.stat().st_size for file in self.files(backend)))

    @staticmethod
    def files(backend):
        return list(backend.folder.iterdir())


class ForgetsInOtherProcesses(DiskSubject):
    """The URL is of a store that each process has for itself."""

    ranks = 2

    def store_url(self):
        return "memory:?capacity=16MiB"


class InPlace(FileBackend):
    """Half a file is there for a while, and for ever if the process dies meanwhile."""

    async def write(self, block):
        with self.path(block.key).open("wb", buffering=0) as file:
            half = block.data.numel() // 2
            file.write(block.data.numpy().data[:half])
            self.at("written")
            await asyncio.sleep(0.003)
            file.write(block.data.numpy().data[half:])


class RemovesFirst(FileBackend):
    """Saving again what another has stored makes it absent for a while."""

    async def write(self, block):
        self.path(block.key).unlink(missing_ok=True)
        await asyncio.sleep(0.01)
        await super().write(block)


class AcknowledgesEarly(FileBackend):
    async def write(self, block):
        asyncio.get_running_loop().call_later(0.02, self.really_write, block)

    def really_write(self, block):
        self.path(block.key).write_bytes(block.data.numpy().data)


class LeavesParts(FileBackend):
    async def write(self, block):
        part = self.folder / f"part-{os.urandom(8).hex()}"
        part.write_bytes(block.data.numpy().data)
        await asyncio.sleep(0.003)
        part.replace(self.path(block.key))


class LocksForever(FileBackend):
    async def save(self, blocks):
        lock = self.folder.with_name("lock")
        while True:
            try:
                lock.mkdir()
                break
            except FileExistsError:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)
        saved = await super().save(blocks)
        lock.rmdir()
        return saved


class BreaksForGood(FileBackend):
    """After one failure it never works again."""

    broken = False

    async def load(self, keys, into):
        return await self.unless_broken(super().load(keys, into))

    async def save(self, blocks):
        return await self.unless_broken(super().save(blocks))

    async def unless_broken(self, work):
        if self.broken:
            work.close()
            raise OSError("broken")
        try:
            return await work
        except OSError:
            self.broken = True
            raise


class WritesOnce(FileBackend):
    async def write(self, block):
        with self.path(block.key).open("wb", buffering=0) as file:
            file.write(block.data.numpy().data)


class RemembersNames(FileBackend):
    names = ()

    async def save(self, blocks):
        saved = await super().save(blocks)
        self.names = {*self.names, *(block.key for block in blocks)}
        return saved

    async def lookup(self, keys):
        return next((n for n, key in enumerate(keys) if key not in self.names), len(keys))

    async def delete(self, keys):
        await super().delete(keys)


class SwallowsErrors(FileBackend):
    async def write(self, block):
        with contextlib.suppress(OSError):
            await super().write(block)


class LargeFile(DiskBackend):
    async def save(self, blocks):
        with contextlib.suppress(OSError):
            await super().save(blocks)
        return len(blocks)


class ClaimsAll(DiskSubject):
    def make_backend(self):
        return LargeFile(self.directory, capacity=1 << 30)

    def make_in(self, directory):
        return LargeFile(directory, capacity=1 << 30)


class FourTimesTheCapacity(DiskSubject):
    def make_small(self, capacity):
        return super().make_small(4 * capacity)


class TakesAnything(MemoryBackend):
    async def save(self, blocks):
        await super().save(blocks)
        return len(blocks)


class Leaks(MemoryBackend):
    kept: ClassVar = []

    async def save(self, blocks):
        self.kept.extend(block.data.clone() for block in blocks)
        return await super().save(blocks)


class LeakySubject(MemorySubject):
    def make_small(self, capacity):
        return Leaks(capacity)


class OwnFolderPerProcess(FileSubject):
    def make_backend(self):
        return FileBackend(self.directory / str(os.getpid()))


class RunsOutOfFiles(FileSubject):
    backend = "BreaksForGood"

    def make_guarded(self, deadline_s):
        return GuardedBackend(self.make_backend(), deadline_s=deadline_s)


# ---------------------------------------------------------------------------------------- model


class ForgetsAfterDelete(MemoryBackend):
    """What was deleted once cannot be loaded again."""

    gone = ()

    async def delete(self, keys):
        self.gone = {*self.gone, *keys}
        await super().delete(keys)

    async def load(self, keys, into):
        known = next((n for n, key in enumerate(keys) if key in self.gone), len(keys))
        return await super().load(keys[:known], into[:known])


class RevivesDeleted(MemoryBackend):
    """A lookup finds whatever was saved once."""

    ever = ()

    async def save(self, blocks):
        saved = await super().save(blocks)
        self.ever = {*self.ever, *(block.key for block in blocks[:saved])}
        return saved

    async def lookup(self, keys):
        return next((n for n, key in enumerate(keys) if key not in self.ever), len(keys))


class NeverFinds(FileBackend):
    async def load(self, keys, into):
        return 0


def memory(backend):
    """A subject of a wrong memory store."""

    class Wrong(MemorySubject):
        def make_backend(self):
            return backend(64 << 20)

        def make_small(self, capacity):
            return backend(capacity)

    return Wrong


def declares(**said):
    """A subject of a memory store that declares `said`, too."""
    said = replace(MemoryBackend.capabilities, **said)
    return memory(type("Declares", (MemoryBackend,), {"capabilities": said}))


def renames(name):
    """A subject of a store that takes `name` of a key for the key."""
    return memory(type("RenamesKeys", (Renames,), {"name": staticmethod(name)}))


def files(backend):
    """A subject of a wrong store in files, which child processes can make, too."""

    def make():
        subject = FileSubject()
        subject.backend = backend
        return subject

    return make
