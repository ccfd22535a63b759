"""Measures reads from S3 and their cost: the store, plain HTTP and boto3 in turn, in each round.

Against a server on the same machine a client's speed says as much about the server, which takes its
part of the processors. The client's own processor time does not. It shows what is left for other
work where the network is the limit, and how fast a network can be before the client is the limit.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvconnect.backend import Backend
from kvconnect.backends.registry import open_backend
from kvconnect.backends.s3.settings import S3Settings
from kvconnect.backends.url import StoreUrl
from kvconnect.bench.report import median_ratio
from kvconnect.bench.store.payloads import Payloads, StorePlan
from kvconnect_bench.peers.s3_boto3 import Boto3
from kvconnect_bench.store.floor_s3 import S3Floor, open_floor, values_per_object

_DEADLINE_S = 120.0


@dataclass(slots=True)
class _Spent:
    """Seconds of each round, on the clock and of this process's processors."""

    wall: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)


def bench_reads(url: str, plan: StorePlan, tell: Callable[[str], None]) -> list[str]:
    """Returns a table of reads: as many calls at once as the store gets elsewhere, and one.

    The numbers in brackets say how many times as fast as boto3 plain HTTP is. Blocks. Removes its
    objects at the end.

    Raises:
        ConfigurationError, BackendUnavailable: the service cannot be used.
    """
    lines = [f"  {'':<58}  {'rate':>9}  client CPU"]
    for size in plan.sizes:
        payloads = Payloads(size, max(2, plan.total_nbytes // size))
        tell(f"reads in turn: {payloads.count} values of {size / 2**20:g} MiB")
        floor = open_floor(url, payloads)
        if floor is None:
            return []
        settings = S3Settings.from_url(StoreUrl.parse(url))
        steps = dict.fromkeys((values_per_object(payloads, settings), 1))
        theirs = [Boto3(settings, payloads, step) for step in steps]
        try:
            lines += asyncio.run(_measure(url, plan, payloads, floor, theirs))
        finally:
            floor.close()
            for boto3 in theirs:
                boto3.close()
    return lines


async def _measure(
    url: str, plan: StorePlan, payloads: Payloads, floor: S3Floor, theirs: Sequence[Boto3]
) -> list[str]:
    store = open_backend(url, deadline_s=_DEADLINE_S)
    await store.open([payloads.layout])
    try:
        for part in payloads.batches(plan.batch_nbytes):
            await store.inner.save(payloads.blocks[part])
        floor.put()
        for boto3 in theirs:
            boto3.put_all(plan.puts_in_flight)
        lines = []
        for at_once in dict.fromkeys((plan.gets_in_flight, 1)):
            ways: dict[str, Callable[[], Awaitable[object]]] = {
                "plain HTTP": _blocking(partial(floor.get_on, at_once)),
                "bare": partial(_load, store.inner, plan, payloads, at_once),
                "guarded": partial(_load, store, plan, payloads, at_once),
                **{one.how: _blocking(partial(one.get_all, at_once)) for one in theirs},
            }
            lines += _lines(payloads, at_once, await _rounds(ways, plan.rounds, payloads))
        return lines
    finally:
        await store.inner.delete(payloads.keys)
        await store.close()


async def _rounds(
    ways: dict[str, Callable[[], Awaitable[object]]], rounds: int, payloads: Payloads
) -> dict[str, _Spent]:
    spent = {how: _Spent() for how in ways}
    for number in range(rounds + 1):
        for how, way in ways.items():
            payloads.spoil()
            start, busy = time.perf_counter(), time.process_time()
            await way()
            if number:  # the first one connects
                spent[how].busy.append(time.process_time() - busy)
                spent[how].wall.append(time.perf_counter() - start)
            if not how.startswith("boto3"):
                payloads.check()
    return spent


def _blocking(work: Callable[[], object]) -> Callable[[], Awaitable[object]]:
    async def way() -> None:
        work()

    return way


async def _load(store: Backend, plan: StorePlan, payloads: Payloads, at_once: int) -> None:
    waiting = payloads.batches(plan.batch_nbytes)

    async def work() -> None:
        for part in waiting:
            await store.load(payloads.keys[part], payloads.into[part])

    await asyncio.gather(*(work() for _ in range(at_once)))


def _lines(payloads: Payloads, at_once: int, spent: dict[str, _Spent]) -> list[str]:
    lines = []
    size = f"{payloads.nbytes / 2**20:g} MiB"
    calls = "one call at a time" if at_once == 1 else f"{at_once} calls at a time"
    for how, one in spent.items():
        rate = payloads.total / statistics.median(one.wall) / 1e9
        busy = statistics.median(one.busy) / payloads.total * 1e9
        line = f"  {size:>7}  {calls:<18}  {how:<29}  {rate:>4.2f} GB/s  {busy:.3f} s/GB"
        if how.startswith("boto3"):
            faster = median_ratio(one.wall, spent["bare"].wall)
            most = median_ratio(one.wall, spent["plain HTTP"].wall)
            cheaper = median_ratio(one.busy, spent["bare"].busy)
            line += f"  bare {faster:.1f} x as fast ({most:.1f} x), {cheaper:.1f} x as cheap"
        lines.append(line)
    return lines
