"""Progress of long work on standard error: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, Never, Self

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = ["Progress"]

_SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Counts up to `total` of `unit`; a context manager. Never writes to standard output."""

    def __init__(self, task: str, total: int, unit: str) -> None:
        self._task = task
        self._total = total
        self._unit = unit
        self._done = 0
        self._told_at = time.monotonic()
        self._bar: tqdm[Never] | None = None
        # Commands that need no extra do without the bar if tqdm is not there.
        if sys.stderr.isatty() and find_spec("tqdm") is not None:
            from tqdm import tqdm

            self._bar = tqdm(desc=task, total=total, unit=f" {unit}", file=sys.stderr, leave=False)

    def advance(self, count: int) -> None:
        """`count` more are done."""
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        elif time.monotonic() - self._told_at >= _SECONDS_BETWEEN_LINES:
            self._told_at = time.monotonic()
            print(f"{self._task}: {self._done} of {self._total} {self._unit}", file=sys.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
