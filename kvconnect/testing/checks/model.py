"""Compares random operations of several clients with a dict."""

from __future__ import annotations

import asyncio
import itertools

from kvconnect.testing.check import check
from kvconnect.testing.subject import Subject, Unsupported


async def _explore(subject: Subject, *, bounded: bool) -> None:
    try:
        from hypothesis import HealthCheck, Phase, settings
        from hypothesis.stateful import run_state_machine_as_test
    except ImportError:
        raise Unsupported("hypothesis is not installed") from None
    from kvconnect.testing.store_machine import StoreMachine

    if bounded:
        subject.make_small(1 << 20)
    numbers = itertools.count()

    class Example(StoreMachine):
        def __init__(self) -> None:
            super().__init__(subject, next(numbers), bounded=bounded)

    chosen = settings(
        max_examples=subject.random_runs * (10 if subject.long else 1),
        stateful_step_count=25,
        deadline=None,
        derandomize=True,
        database=None,
        # Shrinking runs the example a few hundred times; a store on a network is too slow for it.
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    await asyncio.to_thread(run_state_machine_as_test, Example, settings=chosen)


@check("model", limit_s=1800)
async def random_operations(subject: Subject) -> None:
    """A run of random operations by up to three clients gives the results of a dict."""
    await _explore(subject, bounded=False)


@check("model", limit_s=1800)
async def random_operations_when_full(subject: Subject) -> None:
    """A store too small for all finds a part of the dict's blocks, and only right ones."""
    await _explore(subject, bounded=True)
