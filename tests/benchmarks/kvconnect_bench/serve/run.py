"""The load, and the figures of what its clients waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvconnect.bench.report import Figure
from kvconnect_bench.serve.client import Client, Measured
from kvconnect_bench.serve.workload import Workload

_PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Target:
    """The server that is measured.

    Attributes:
        url: without a path.
        model: as it calls the model.
        api_key: if the server requires one.
    """

    url: str
    model: str
    api_key: str | None = None


def measure(target: Target, workload: Workload, concurrency: int) -> list[Figure]:
    """Measures `workload` with `concurrency` sessions at once. Blocks until all are answered.

    Raises:
        RequestFailed: a request was not answered.
    """
    return asyncio.run(_measure(target, workload, concurrency))


async def _measure(target: Target, workload: Workload, concurrency: int) -> list[Figure]:
    sessions = iter(workload.sessions())
    measured: list[Measured] = []
    async with Client(target.url, target.model, target.api_key, concurrency) as client:

        async def work() -> None:
            for session in sessions:  # shared: each takes the next one
                measured.extend(await session(client))

        started = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(concurrency):
                    tasks.create_task(work())
        except ExceptionGroup as failed:  # the first one ended the others
            raise failed.exceptions[0] from failed
        seconds = time.perf_counter() - started
    return _figures(measured, seconds)


def _figures(measured: Sequence[Measured], seconds: float) -> list[Figure]:
    prompt = sum(one.prompt_tokens for one in measured)
    cached = sum(one.cached_tokens for one in measured)
    output = sum(one.output_tokens for one in measured)
    gaps = [gap for one in measured for gap in one.gaps_s]
    return [
        Figure("requests", len(measured), ""),
        Figure("duration", seconds, "s"),
        Figure("requests per second", len(measured) / seconds, "1/s"),
        Figure("output tokens per second", output / seconds, "tokens/s"),
        Figure("prompt tokens", prompt, "tokens"),
        # Other servers may not count them.
        Figure("hit rate: cached of them", 100 * cached / prompt if prompt else 0.0, "%"),
        *_distribution("time to first token", [one.ttft_s for one in measured]),
        *_distribution("inter-token latency", gaps),
    ]


def _distribution(name: str, seconds: Sequence[float]) -> list[Figure]:
    if not seconds:
        return []
    found = [Figure(f"{name}, mean", 1e3 * float(np.mean(seconds)), "ms")]
    for percentile in _PERCENTILES:
        value = 1e3 * float(np.percentile(seconds, percentile))
        found.append(Figure(f"{name}, p{percentile}", value, "ms"))
    return found
