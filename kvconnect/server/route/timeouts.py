"""How long a server is waited for, as long as this process runs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["within"]

T = TypeVar("T")

_LOOK_S = 0.25
"""Between two looks at the clock, which show whether this process ran meanwhile."""


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns, or raises.

    Time that this process was stopped is not counted, but for a quarter of a second: what it was to
    hear meanwhile is there, and is not read yet.

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
