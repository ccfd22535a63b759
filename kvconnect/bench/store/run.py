"""Measures a store against what the machine can do: ``kvconnect bench store``.

Every round measures the floor, the store itself and the store as engines use it, through
`open_backend`, one after the other on the same bytes. Each of the three is first in some rounds.
What slows a round down slows all three.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvconnect.backend import Backend
from kvconnect.backends.registry import open_backend
from kvconnect.backends.url import StoreUrl
from kvconnect.bench.checkout import from_checkout, has_checkout
from kvconnect.bench.store.floor import Floor, checksum_seconds, fastest
from kvconnect.bench.store.payloads import Payloads, StorePlan
from kvconnect.bench.store.report import StoreFigure
from kvconnect.errors import ConfigurationError

__all__ = ["StorePlan", "bench_store"]

Tell = Callable[[str], None]

_FLOOR, _BARE, _GUARDED = "floor", "bare", "guarded"
_HASHED = "floor, hashed"
_OPERATIONS = ("put", "get", "lookup")
_DEADLINE_S = 120.0


def bench_store(url: str, plan: StorePlan, tell: Tell) -> list[StoreFigure]:
    """Measures the store of `url`. Blocks for about a minute.

    The store may hold other blocks. The blocks of the benchmark are deleted at the end.

    Args:
        url: of the store, which must have room for ``plan.total_nbytes``.
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


@dataclass(slots=True)
class _Rounds:
    """The measurements of one operation done one way, round by round.

    `rates` are in bytes or keys per second, the other lists in seconds. A round of `floors` has one
    number for each way of the floor. A round of `extra` has the checksum's time, which is added to
    the floor, on one thread and on two. `hashed` has the floor's rounds in which the thread that
    moves a value hashes it.
    """

    rates: list[float] = field(default_factory=list)
    floors: list[Sequence[float]] = field(default_factory=list)
    extra: list[Sequence[float]] = field(default_factory=list)
    hashed: list[Sequence[float]] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)

    def floor_rates(self, amount: int) -> list[float]:
        """Returns the floor's rate in each round, for `amount` bytes or keys."""
        seconds = fastest(self.floors)
        extra = fastest(self.extra) if self.extra else [0.0] * len(seconds)
        return [amount / sum(both) for both in zip(seconds, extra, strict=True)]


async def _measure(url: str, plan: StorePlan, payloads: Payloads, tell: Tell) -> list[StoreFigure]:
    store = open_backend(url, deadline_s=_DEADLINE_S)
    await store.open([payloads.layout])
    floor: Floor | None = None
    ways = {_BARE: store.inner, _GUARDED: store}
    found = {(how, what): _Rounds() for how in ways for what in _OPERATIONS}
    try:
        floor = _floor(url, store.inner, payloads, tell)
        # Each is first by turns: a disk after a pause, or memory that was just read, is faster.
        turns = deque([_FLOOR, *ways])
        for number in range(plan.rounds + 1):
            # The first round touches memory and allocates files, so it does not count.
            rounds = found if number else {key: _Rounds() for key in found}
            await _one_round(ways, floor, plan, payloads, rounds, turns)
            turns.rotate()
    except _Fewer as error:
        raise ConfigurationError(
            f"{StoreUrl.parse(url)}: {error}: the benchmark needs room for {payloads.total} bytes "
            f"beside what the store holds, and that nobody else fills it meanwhile; give it more "
            f"capacity, or measure with a smaller --total"
        ) from error
    finally:
        await store.inner.delete(payloads.keys)
        await store.close()
        if floor is not None:
            floor.close()
    name = StoreUrl.parse(url).scheme
    figures = [
        _figure(name, how, what, plan, payloads, rounds, floor)
        for (how, what), rounds in found.items()
    ]
    for (_, what), one in found.items():
        if floor is not None and any(one.hashed):
            rates = [payloads.total / seconds for seconds in fastest(one.hashed)]
            floors = one.floor_rates(payloads.total)
            named = (name, what, _HASHED, payloads.nbytes)
            figures.append(StoreFigure.of(named, rates, floors=floors, floor_name=floor.name))
    return figures


def _floor(url: str, store: Backend, payloads: Payloads, tell: Tell) -> Floor | None:
    if not has_checkout():
        tell("floors are left out: they need a checkout of kvconnect")
        return None
    floor: Floor | None = from_checkout("store.floors", "a floor").make_floor(url, store, payloads)
    if floor is None:
        tell(f"there is no floor to compare a store of this kind with: {StoreUrl.parse(url)}")
    return floor


async def _one_round(
    ways: Mapping[str, Backend],
    floor: Floor | None,
    plan: StorePlan,
    payloads: Payloads,
    found: dict[tuple[str, str], _Rounds],
    turns: Iterable[str],
) -> None:
    """Measures the floor and each of `ways`, in the order of `turns`."""
    for turn in turns:
        if turn in ways:
            rounds = {what: found[turn, what] for what in _OPERATIONS}
            await _round(ways[turn], plan, payloads, rounds)
        elif floor is not None:
            _measure_floor(floor, plan, payloads, found)
            found[_BARE, "put"].hashed.append(floor.hashed_put())
            found[_BARE, "get"].hashed.append(floor.hashed_get())


async def _round(
    store: Backend, plan: StorePlan, payloads: Payloads, found: dict[str, _Rounds]
) -> None:
    """Puts, looks up and gets all values once, then times calls with one value."""
    await store.delete(payloads.keys)
    batches = list(payloads.batches(plan.batch_nbytes))

    async def put(part: slice) -> None:
        _expect(await store.save(payloads.blocks[part]), part, "stored")

    async def get(part: slice) -> None:
        keys = payloads.keys[part]
        _expect(await store.load(keys, payloads.into[part]), part, "loaded")

    found["put"].rates.append(payloads.total / await _all(map(put, batches), plan.puts_in_flight))
    payloads.spoil()
    found["get"].rates.append(payloads.total / await _all(map(get, batches), plan.gets_in_flight))
    payloads.check()
    asked = payloads.asked(plan.lookup_keys)
    lookups = [await _timed(store.lookup(asked)) for _ in range(4 * plan.latencies)]
    found["lookup"].latencies += lookups
    found["lookup"].rates.append(plan.lookup_keys / statistics.median(lookups))
    ones = [slice(at, at + 1) for at in range(min(plan.latencies, payloads.count))]
    found["get"].latencies += [await _timed(get(one)) for one in ones]
    await store.delete(payloads.keys[: len(ones)])
    found["put"].latencies += [await _timed(put(one)) for one in ones]


def _measure_floor(
    floor: Floor, plan: StorePlan, payloads: Payloads, found: dict[tuple[str, str], _Rounds]
) -> None:
    seconds: dict[str, Sequence[float]] = {"put": floor.put(), "get": floor.get()}
    if (lookup := floor.lookup(plan.lookup_keys)) is not None:
        seconds["lookup"] = [lookup]
    checksum = None if floor.overlaps else checksum_seconds(payloads)
    for (how, what), rounds in found.items():
        if what in seconds:
            rounds.floors.append(seconds[what])
        if checksum is not None and how == _GUARDED and what != "lookup":
            rounds.extra.append(checksum)


def _figure(
    store: str,
    how: str,
    what: str,
    plan: StorePlan,
    payloads: Payloads,
    rounds: _Rounds,
    floor: Floor | None,
) -> StoreFigure:
    amount = plan.lookup_keys if what == "lookup" else payloads.total
    floors = rounds.floor_rates(amount) if rounds.floors else []
    name = "" if floor is None else floor.name
    if how == _GUARDED and floor is not None and not floor.overlaps and what != "lookup":
        name += " + checksum"
    if what == "lookup":
        name = {"memcpy": "dict", "O_DIRECT slots": "one query", "plain HTTP": "dict"}.get(
            name, name
        )
    return StoreFigure.of(
        (store, what, how, payloads.nbytes),
        rounds.rates,
        floors=floors,
        floor_name=name,
        latencies=rounds.latencies,
    )


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
