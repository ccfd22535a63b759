"""Reads from S3 one call at a time, and what they cost: the store, plain HTTP and boto3 in turn.

Against a server on the same machine a client's speed says as much about the server, which takes its
part of the processors. The processor time of the client alone does not: it is what is left for
others where the network is the limit, and how fast a network can be before the client is.
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
from kvconnect.backends.s3_settings import S3Settings
from kvconnect.backends.url import StoreUrl
from kvconnect.bench.store_floor_s3 import S3Floor, open_floor, values_per_object
from kvconnect.bench.store_payloads import Payloads, StorePlan
from kvconnect.bench.store_report import median_ratio
from kvconnect.bench.store_s3_boto3 import Boto3

__all__ = ["bench_single"]

_DEADLINE_S = 120.0


@dataclass(slots=True)
class _Spent:
    """Seconds of each round, on the clock and of this process's processors."""

    wall: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)


def bench_single(url: str, plan: StorePlan, tell: Callable[[str], None]) -> list[str]:
    """A table. Blocks; leaves nothing behind.

    Raises:
        ConfigurationError, BackendUnavailable: the service cannot be used.
    """
    lines = [f"  {'one call at a time':<44}  {'rate':>10}  client CPU"]
    for size in plan.sizes:
        payloads = Payloads(size, max(2, plan.total_nbytes // size))
        tell(f"one call at a time: {payloads.count} values of {size / 2**20:g} MiB")
        floor = open_floor(url, payloads)
        if floor is None:
            return []
        settings = S3Settings.from_url(StoreUrl.parse(url))
        steps = dict.fromkeys((values_per_object(payloads, settings), 1))
        theirs = [Boto3(settings, payloads, step) for step in steps]
        try:
            spent = asyncio.run(_measure(url, plan, payloads, floor, theirs))
        finally:
            floor.close()
            for boto3 in theirs:
                boto3.close()
        lines += _lines(payloads, spent)
    return lines


async def _measure(
    url: str, plan: StorePlan, payloads: Payloads, floor: S3Floor, theirs: Sequence[Boto3]
) -> dict[str, _Spent]:
    store = open_backend(url, deadline_s=_DEADLINE_S)
    await store.open([payloads.layout])
    ways: dict[str, Callable[[], Awaitable[object]]] = {
        "plain HTTP": _blocking(floor.get_on_one),
        "bare": lambda: _load(store.inner, plan, payloads),
        "guarded": lambda: _load(store, plan, payloads),
        **{boto3.how: _blocking(partial(_get, boto3)) for boto3 in theirs},
    }
    spent = {how: _Spent() for how in ways}
    try:
        for part in payloads.batches(plan.batch_nbytes):
            await store.inner.save(payloads.blocks[part])
        floor.put()
        for boto3 in theirs:
            for name in boto3.names:
                boto3.put(name)
        for number in range(plan.rounds + 1):
            for how, way in ways.items():
                payloads.spoil()
                start, busy = time.perf_counter(), time.process_time()
                await way()
                if number:  # the first one connects
                    spent[how].busy.append(time.process_time() - busy)
                    spent[how].wall.append(time.perf_counter() - start)
                if not how.startswith("boto3"):
                    payloads.check()
    finally:
        await store.inner.delete(payloads.keys)
        await store.close()
    return spent


def _blocking(work: Callable[[], object]) -> Callable[[], Awaitable[object]]:
    async def way() -> None:
        work()

    return way


async def _load(store: Backend, plan: StorePlan, payloads: Payloads) -> None:
    for part in payloads.batches(plan.batch_nbytes):
        await store.load(payloads.keys[part], payloads.into[part])


def _get(boto3: Boto3) -> None:
    for name in boto3.names:
        boto3.get(name)


def _lines(payloads: Payloads, spent: dict[str, _Spent]) -> list[str]:
    lines = []
    for how, one in spent.items():
        rate = payloads.total / statistics.median(one.wall) / 1e9
        busy = statistics.median(one.busy) / payloads.total * 1e9
        size = f"{payloads.nbytes / 2**20:g} MiB"
        line = f"  {size:>7}  get    {how:<28}  {rate:>5.2f} GB/s  {busy:.3f} s/GB"
        if how.startswith("boto3"):
            faster = median_ratio(one.wall, spent["bare"].wall)
            cheaper = median_ratio(one.busy, spent["bare"].busy)
            line += f"  bare {faster:.1f} x as fast, {cheaper:.1f} x as cheap"
        lines.append(line)
    return lines
