"""Measures a store against what the machine can do: ``kvconnect bench store``.

Every round measures the floor, the store itself and the store as engines use it, through
`open_backend`, one after the other on the same bytes. Each of the three is first in some rounds.
What slows a round down slows all three.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from kvconnect.backend import Backend
from kvconnect.backends.registry import open_backend
from kvconnect.backends.url import StoreUrl
from kvconnect.bench.checkout import from_checkout, has_checkout
from kvconnect.bench.store.floor import Floor, checksum_seconds, fastest
from kvconnect.bench.store.payloads import Payloads, StorePlan
from kvconnect.bench.store.report import StoreFigure
from kvconnect.errors import ConfigurationError

Tell = Callable[[str], None]

_FLOOR, _BARE, _GUARDED = "floor", "bare", "guarded"
_HASHED, _CHECKSUM = "floor, hashed", "checksum"
_LOOKUP_FLOORS = {"memcpy": "dict", "O_DIRECT slots": "one query", "plain HTTP": "dict"}
_OPERATIONS = ("put", "get", "lookup")
_DEADLINE_S = 120.0


def bench_store(url: str, plan: StorePlan, tell: Tell) -> list[StoreFigure]:
    """Measures the store of `url`. Blocks for about a minute.

    The store may hold other blocks. The blocks of the benchmark are deleted at the end.

    Args:
        url: the URL of the store, which must have room for ``plan.total_nbytes``.
        plan: what to measure.
        tell: called with a sentence about each step.

    Raises:
        ConfigurationError: the store cannot be opened, or has too little room.
        RetryLater: the store failed.
        BadFrame: the store returned other bytes.
    """
    figures: list[StoreFigure] = []
    for size in plan.sizes:
        payloads = Payloads(size, max(2, plan.total_nbytes // size))
        tell(f"{payloads.count} values of {size / 2**20:g} MiB, {plan.rounds} rounds")
        figures += asyncio.run(_measure(url, plan, payloads, tell))
    return figures


async def _measure(url: str, plan: StorePlan, payloads: Payloads, tell: Tell) -> list[StoreFigure]:
    store = open_backend(url, deadline_s=_DEADLINE_S)
    await store.open([payloads.layout])
    floor: Floor | None = None
    try:
        floor = _floor(url, store.inner, payloads, tell)
        trial = _Trial({_BARE: store.inner, _GUARDED: store}, floor, plan, payloads)
        # Each is first by turns: a disk after a pause, or memory that was just read, is faster.
        turns = deque([_FLOOR, _BARE, _GUARDED])
        for number in range(plan.rounds + 1):
            if number == 1:
                trial.clear()  # the first round touches memory and allocates files
            await trial.run(turns)
            turns.rotate()
    except _Fewer as error:
        raise ConfigurationError(
            f"{StoreUrl.parse(url)}: {error}: the benchmark needs room for {payloads.total} bytes "
            f"beside the blocks of the store, and no other process may fill it meanwhile; give the "
            f"store more capacity, or measure with a smaller --total"
        ) from error
    finally:
        await store.inner.delete(payloads.keys)
        await store.close()
        if floor is not None:
            floor.close()
    return trial.figures(StoreUrl.parse(url).scheme)


def _floor(url: str, store: Backend, payloads: Payloads, tell: Tell) -> Floor | None:
    if not has_checkout():
        tell("floors are left out: they need a checkout of kvconnect")
        return None
    floor: Floor | None = from_checkout("store.floors", "a floor").make_floor(url, store, payloads)
    if floor is None:
        tell(f"there is no floor to compare a store of this kind with: {StoreUrl.parse(url)}")
    return floor


class _Trial:
    """A store, used in several ways, and its floor, measured round by round."""

    def __init__(
        self, ways: Mapping[str, Backend], floor: Floor | None, plan: StorePlan, payloads: Payloads
    ) -> None:
        self._ways = ways
        self._floor = floor
        self._plan = plan
        self._payloads = payloads
        self.clear()

    def clear(self) -> None:
        """Forgets all rounds."""
        # By way and operation: bytes or keys per second of each round, and seconds of single calls.
        self._rates: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        self._latencies: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        # For each round: the seconds of each way of the floor.
        self._floors: defaultdict[str, list[Sequence[float]]] = defaultdict(list)

    async def run(self, turns: Iterable[str]) -> None:
        """Measures the floor and each way once, in the order of `turns`."""
        for turn in turns:
            if turn in self._ways:
                await self._use(turn)
            elif self._floor is not None:
                self._measure_floor(self._floor)

    async def _use(self, how: str) -> None:
        """Measures one round of the store `how`.

        Puts, gets and looks up all values once, then times calls with one value.
        """
        store, plan, payloads = self._ways[how], self._plan, self._payloads
        await store.delete(payloads.keys)
        batches = list(payloads.batches(plan.batch_nbytes))

        async def put(part: slice) -> None:
            _expect(await store.save(payloads.blocks[part]), part, "stored")

        async def get(part: slice) -> None:
            keys = payloads.keys[part]
            _expect(await store.load(keys, payloads.into[part]), part, "loaded")

        seconds = await _all(map(put, batches), plan.puts_in_flight)
        self._rates[how, "put"].append(payloads.total / seconds)
        payloads.spoil()
        seconds = await _all(map(get, batches), plan.gets_in_flight)
        self._rates[how, "get"].append(payloads.total / seconds)
        payloads.check()
        asked = payloads.asked(plan.lookup_keys)
        lookups = [await _timed(store.lookup(asked)) for _ in range(4 * plan.latencies)]
        self._latencies[how, "lookup"] += lookups
        self._rates[how, "lookup"].append(plan.lookup_keys / statistics.median(lookups))
        ones = [slice(at, at + 1) for at in range(min(plan.latencies, payloads.count))]
        self._latencies[how, "get"] += [await _timed(get(one)) for one in ones]
        await store.delete(payloads.keys[: len(ones)])
        self._latencies[how, "put"] += [await _timed(put(one)) for one in ones]

    def _measure_floor(self, floor: Floor) -> None:
        self._floors["put"].append(floor.put())
        self._floors["get"].append(floor.get())
        if (lookup := floor.lookup(self._plan.lookup_keys)) is not None:
            self._floors["lookup"].append([lookup])
        if not floor.overlaps:
            self._floors[_CHECKSUM].append(checksum_seconds(self._payloads))
        for what, hashed in (("put", floor.hashed_put()), ("get", floor.hashed_get())):
            if hashed:
                self._floors[f"{what}, hashed"].append(hashed)

    def figures(self, store: str) -> list[StoreFigure]:
        """Returns the figures of all ways, then those of a floor that hashes as it moves."""
        figures = [self._figure(store, how, what) for how in self._ways for what in _OPERATIONS]
        nbytes, total = self._payloads.nbytes, self._payloads.total
        for what in _OPERATIONS:
            if rates := self._floor_rates(f"{what}, hashed", total):
                named = (store, what, _HASHED, nbytes)
                floors = self._floor_rates(what, total)
                figures.append(
                    StoreFigure.of(named, rates, floors=floors, floor_name=self._floor_name)
                )
        return figures

    def _figure(self, store: str, how: str, what: str) -> StoreFigure:
        lookup = what == "lookup"
        amount = self._plan.lookup_keys if lookup else self._payloads.total
        checksum = how == _GUARDED and not lookup and bool(self._floors[_CHECKSUM])
        name = self._floor_name + (" + checksum" if checksum else "")
        return StoreFigure.of(
            (store, what, how, self._payloads.nbytes),
            self._rates[how, what],
            floors=self._floor_rates(what, amount, checksum=checksum),
            floor_name=_LOOKUP_FLOORS.get(name, name) if lookup else name,
            latencies=self._latencies[how, what],
        )

    @property
    def _floor_name(self) -> str:
        return "" if self._floor is None else self._floor.name

    def _floor_rates(self, what: str, amount: int, *, checksum: bool = False) -> list[float]:
        """Returns the floor's rate in each round, for `amount` bytes or keys; empty: it has none.

        The time of a `checksum` pass is added to the floor's.
        """
        if not self._floors[what]:
            return []
        seconds = fastest(self._floors[what])
        more = fastest(self._floors[_CHECKSUM]) if checksum else [0.0] * len(seconds)
        return [amount / sum(both) for both in zip(seconds, more, strict=True)]


async def _all(calls: Iterable[Awaitable[None]], in_flight: int) -> float:
    """Returns the seconds until all of `calls` are done, with `in_flight` of them at once."""
    waiting = iter(calls)

    async def work() -> None:
        for call in waiting:
            await call

    start = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(in_flight)))
    return time.perf_counter() - start


async def _timed(call: Awaitable[object]) -> float:
    start = time.perf_counter()
    await call
    return time.perf_counter() - start


class _Fewer(Exception):
    """The store saved or loaded fewer values than it was given."""


def _expect(count: int, part: slice, what: str) -> None:
    if count != part.stop - part.start:
        raise _Fewer(f"{count} of {part.stop - part.start} values of a call were {what}")
