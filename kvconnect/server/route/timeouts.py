"""Limits the wait for a server, counting only the time that this process runs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["within"]

T = TypeVar("T")

_LOOK_S = 0.25
"""The seconds between two checks of the clock, which show whether this process ran meanwhile."""


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`, or raises its error.

    Time in which this process was stopped is not counted, except a quarter of a second: answers
    that arrived meanwhile have not been read yet.

    Raises:
        TimeoutError: it takes longer than `seconds`; it is cancelled, and has ended.
    """
    task = asyncio.create_task(work)
    try:
        while seconds > 0:
            done, _ = await asyncio.wait({task}, timeout=min(seconds, _LOOK_S))
            if done:
                return task.result()
            seconds -= _LOOK_S
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    raise TimeoutError
