"""A soak with random faults: loads must be right and in time, and the store must recover."""

from __future__ import annotations

import asyncio
import errno
import gc
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from kvconnect.backend import Backend
from kvconnect.backends.guard.store import GuardedBackend
from kvconnect.backends.main_loop import run_to_end
from kvconnect.keys import BlockKey
from kvconnect.testing.check import Violation, demand
from kvconnect.testing.checks.faults import answer, recovers
from kvconnect.testing.faults.faulty_backend import BACKEND_FAULTS, FaultyBackend
from kvconnect.testing.faults.faulty_filesystem import (
    FILE_OPERATIONS,
    FaultyFilesystem,
    FileOperation,
)
from kvconnect.testing.faults.tcp_fault import TcpFault, garbage, longer, shorter
from kvconnect.testing.faults.tcp_proxy import TcpProxy
from kvconnect.testing.processes.usage import descriptors, resident_nbytes
from kvconnect.testing.subject import Address, Subject

_DEADLINE_S = 1.0
_CLIENTS = 4
_KEYS = 200
_ROUNDS_PER_OPENING = 6


@dataclass(frozen=True, slots=True)
class SoakReport:
    """The result of a soak.

    Attributes:
        seed: repeats the soak.
        seconds: duration of the soak.
        rounds: faults set and healed.
        counts: of calls, and how they ended.
    """

    seed: int
    seconds: float
    rounds: int
    counts: Mapping[str, int]

    def __str__(self) -> str:
        counts = ", ".join(f"{number} {name}" for name, number in sorted(self.counts.items()))
        return f"soak: {self.rounds} rounds in {self.seconds:.0f} s, seed {self.seed}: {counts}"


def soak(
    subject: Subject,
    *,
    seconds: float = 1800.0,
    seed: int = 0,
    told: Callable[[float], None] | None = None,
) -> SoakReport:
    """Calls a store from several clients while the store, its disk or its network fail at random.

    Blocks.

    Args:
        subject: the store; with `directory` its files fail, too, with `address` its network.
        seconds: how long; the last round is finished.
        seed: of the faults and the calls. (When each call meets its fault depends on the machine.)
        told: called after each round with the seconds since the last time.

    Raises:
        Violation: a block was wrong, a call took too long, the store was not usable again, or
            memory or file descriptors leak. The message names the round's fault and the seed.
    """
    return _StoreSoak(subject, seed).run(seconds, told)


class Soak(ABC):
    """A soak of what `opening` opens: random faults in one opening after the other.

    Attributes:
        subject: the store.
        random: chooses faults and work.
        counts: of the work, for the report.
        fault: the present fault, for the message of a violation.
    """

    def __init__(self, subject: Subject, seed: int) -> None:
        subject.seed = self._seed = seed
        self.subject = subject
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.fault = "none"

    @abstractmethod
    def opening(self, end: float) -> int:
        """Opens the store, sets and heals faults, and closes it; returns the number of rounds.

        Args:
            end: the monotonic time after which no round begins.
        """

    def run(self, seconds: float, told: Callable[[float], None] | None) -> SoakReport:
        """Runs openings for so many seconds; see `soak`."""
        start = last = time.monotonic()
        rounds = 0
        used: list[tuple[int, int]] = []
        try:
            while time.monotonic() - start < seconds:
                rounds += self.opening(start + seconds)
                gc.collect()  # the error of a lost rank refers to its engine
                used.append((descriptors(), resident_nbytes()))
                if told is not None:
                    told(time.monotonic() - last)
                    last = time.monotonic()
        except Exception as error:
            what = str(error) if isinstance(error, Violation) else repr(error)
            raise Violation(f"seed {self._seed}, fault {self.fault}: {what}") from error
        _expect_no_leak(used)
        return SoakReport(self._seed, time.monotonic() - start, rounds, dict(self.counts))


class _StoreSoak(Soak):
    def __init__(self, subject: Subject, seed: int) -> None:
        super().__init__(subject, seed)
        self._blocks = subject.blocks("soak")
        self._keys = self._blocks.keys(count=_KEYS)

    def opening(self, end: float) -> int:
        with ExitStack() as tools:
            return run_to_end(self._opening(tools, end))

    async def _opening(self, tools: ExitStack, end: float) -> int:
        subject, proxy, files = self.subject, None, None
        made: Backend
        if subject.address is not None:
            proxy = tools.enter_context(TcpProxy(subject.address.host, subject.address.port))
            made = subject.make_via(Address(proxy.host, proxy.port))
        else:
            made = subject.make_backend()
        if subject.directory is not None:
            files = tools.enter_context(FaultyFilesystem(subject.directory))
        faulty = FaultyBackend(
            subject.bare(made), seed=self.random.randrange(1 << 30), delay_s=1.5 * _DEADLINE_S
        )
        rounds = 0
        async with subject.guarded(_DEADLINE_S, faulty) as store:
            while rounds < _ROUNDS_PER_OPENING and time.monotonic() < end:
                rounds += 1
                self._break(faulty, proxy, files)
                await self._traffic(store, self.random.uniform(0.2, 2.0))
                faulty.heal()
                if proxy is not None:
                    proxy.heal()
                if files is not None:
                    files.heal()
                await recovers(store, self._blocks, f"round {rounds}")
                await self._traffic(store, 0.2)
        return rounds

    def _break(
        self, faulty: FaultyBackend, proxy: TcpProxy | None, files: FaultyFilesystem | None
    ) -> None:
        chance = self.random
        kinds = [
            "backend",
            *(["network"] * (proxy is not None)),
            *(["files"] * (files is not None)),
        ]
        kind = chance.choice(kinds)
        if kind == "network" and proxy is not None:
            fault = random_fault(chance)
            self.fault = repr(fault)
            proxy.set(fault)
        elif kind == "files" and files is not None:
            number = chance.choice((errno.EIO, errno.ENOSPC, errno.EINTR, errno.EMFILE))
            if chance.random() < 0.25:
                files.short("write")
                files.short("read")
                self.fault = "short reads and writes"
            else:
                operation: FileOperation = chance.choice(FILE_OPERATIONS)
                files.fail(operation, number, times=chance.choice((-1, 1, 3)))
                self.fault = f"{operation} fails with {errno.errorcode[number]}"
        else:
            self.fault = fault_of_store = chance.choice(BACKEND_FAULTS)
            faulty.set(fault_of_store)

    async def _traffic(self, store: GuardedBackend, seconds: float) -> None:
        end = time.monotonic() + seconds
        seeds = [self.random.randrange(1 << 30) for _ in range(_CLIENTS)]
        await asyncio.gather(*(self._client(store, random.Random(s), end) for s in seeds))

    async def _client(self, store: GuardedBackend, chance: random.Random, end: float) -> None:
        while time.monotonic() < end:
            first = chance.randrange(_KEYS)
            keys = self._keys[first : first + chance.randrange(1, 9)]
            name = chance.choice(("lookup", "load", "load", "save", "save", "delete"))
            self.counts[f"{name}s"] += 1
            done = await self._call(store, name, keys)
            self.counts["calls that failed"] += done is None
            if done is None:
                await asyncio.sleep(0.01)  # while the circuit is open calls fail in microseconds

    async def _call(self, store: GuardedBackend, name: str, keys: list[BlockKey]) -> int | None:
        blocks, what = self._blocks, f"{name} of {len(keys)} blocks"
        if name == "lookup":
            return await answer(store.lookup(keys), _DEADLINE_S, what)
        if name == "save":
            return await answer(store.save(blocks.chain(keys)), _DEADLINE_S, what)
        if name == "delete":
            await answer(store.delete(keys[:2]), _DEADLINE_S, what)
            return 0
        into = blocks.buffers(len(keys))
        loaded = await answer(store.load(keys, into), _DEADLINE_S, what)
        demand(all(map(blocks.holds, into, keys[: loaded or 0])), "a wrong block was a hit")
        self.counts["blocks loaded"] += loaded or 0
        return loaded


def random_fault(chance: random.Random) -> TcpFault:
    """Returns a fault of a network, of any kind."""
    at = chance.randrange(1, 200_000)
    return chance.choice(
        [
            TcpFault(refused=True),
            TcpFault(black_hole=True),
            TcpFault(frozen=True),
            TcpFault(half_open=True),
            TcpFault(reset_after=at),
            TcpFault(bytes_per_s=1),
            TcpFault(delay_s=0.5),
            TcpFault(rewrite=garbage(at)),
            TcpFault(rewrite=shorter(at, 3)),
            TcpFault(rewrite=longer(at, 3)),
        ]
    )


def _expect_no_leak(used: Sequence[tuple[int, int]]) -> None:
    """Checks that this process does not grow with the openings of a store.

    Args:
        used: file descriptors and bytes of memory after each opening.

    Raises:
        Violation: this process grows.
    """
    # The first openings fill caches and pools; after them nothing may grow with the rounds.
    if len(used) < 8:
        return
    early, late = used[len(used) // 4], used[-1]
    demand(late[0] <= early[0] + 8, f"file descriptors grew from {early[0]} to {late[0]}")
    grew = (late[1] - early[1]) >> 20
    demand(grew < 256, f"the process grew by {grew} MiB")
