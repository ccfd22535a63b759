"""Shows the progress of long work on standard error: a bar on a terminal, else lines."""

from __future__ import annotations

import asyncio
import sys
import time
from contextvars import ContextVar
from importlib.util import find_spec
from typing import TYPE_CHECKING, Never, Self

from kvconnect.backends.url import format_size

if TYPE_CHECKING:
    from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 5.0
_BYTES = "bytes"


is_shown: ContextVar[bool] = ContextVar("is_shown", default=True)
"""False in a server, whose log programs may read: no progress is written there."""


class Progress:
    """Counts up to `total` of `unit`; a context manager. Never writes to standard output.

    In ``async with`` it also prints while the count does not change, as long as the event loop
    runs.

    Args:
        task: the name of the work.
        total: 0: not known.
        unit: the unit of the count; ``bytes`` are shown in readable units, and with their rate.
        lines: print lines also on a terminal, for commands that write there meanwhile.
    """

    def __init__(self, task: str, total: int, unit: str, *, lines: bool = False) -> None:
        self._task = task
        self._total = total
        self._unit = unit
        self._done = 0
        self._started_at = self._told_at = time.monotonic()
        self._shown = is_shown.get()
        self._bar: tqdm[Never] | None = None
        self._ticking: asyncio.Task[None] | None = None
        # Commands that need no extra do without the bar if tqdm is not there.
        if self._shown and not lines and sys.stderr.isatty() and find_spec("tqdm") is not None:
            from tqdm import tqdm

            sizes = unit == _BYTES
            self._bar = tqdm(
                desc=task,
                total=total or None,
                unit="B" if sizes else f" {unit}",
                unit_scale=sizes,
                unit_divisor=1024 if sizes else 1000,
                file=sys.stderr,
                leave=False,
            )

    def advance(self, count: int) -> None:
        """Adds `count` to the finished work."""
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        elif self._shown and (now := time.monotonic()) - self._told_at >= _SECONDS_BETWEEN_LINES:
            self._told_at = now
            print(f"{self._task}: {self._state(now)}", file=sys.stderr)

    def _state(self, now: float) -> str:
        if self._unit != _BYTES:
            whole = f" of {self._total}" if self._total else ""
            return f"{self._done}{whole} {self._unit}"
        whole = f" of {format_size(self._total)}" if self._total else ""
        rate = format_size(int(self._done / max(now - self._started_at, 1e-9)))
        return f"{format_size(self._done)}{whole}, {rate}/s"

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_SECONDS_BETWEEN_LINES)
            self.advance(0)

    def __enter__(self) -> Self:
        return self

    async def __aenter__(self) -> Self:
        self._ticking = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        self.__exit__()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
