"""The gauges of a store's size and of its calls, for monitoring."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import CancelledError, Future

from kvconnect.backends.guard.breaker import BreakerState
from kvconnect.backends.guard.calls import Calls, mapped
from kvconnect.errors import RetryLater
from kvconnect.trace import Labels, metrics

# Seconds that a reader of metrics waits for the store's own numbers before it gets the last ones.
_LONGEST_WAIT_S = 0.5
_OF_THE_STORE = ("blocks", "bytes", "capacity")


class GuardGauges:
    """The gauges of one guarded store, registered while the store is open.

    The gauges are ``store.breaker_state``, ``store.running``, ``store.abandoned``, and those of
    ``store.blocks``, ``store.bytes`` and ``store.capacity`` that the store reports.
    """

    def __init__(
        self,
        calls: Calls,
        stats: Callable[[], Awaitable[Mapping[str, float]]],
    ) -> None:
        self._calls = calls
        self._stats = stats
        self._loop: asyncio.AbstractEventLoop | None = None
        self._remove: Callable[[], None] | None = None
        self._last: Mapping[str, float] = {}
        self._asking: Future[dict[str, float]] | None = None

    def show(self, loop: asyncio.AbstractEventLoop, labels: Labels) -> None:
        """Registers the gauges under `labels`; reads the store's own numbers on `loop`."""
        self.hide()
        self._loop = loop
        self._remove = metrics.add_gauges(self.read, labels)

    def hide(self) -> None:
        """Removes the gauges; a second call does nothing."""
        if self._remove is not None:
            self._remove()
        self._remove = self._loop = None

    def read(self) -> dict[str, float]:
        """Returns all gauges. Blocks half a second at most, but never on the store's own loop."""
        found = {f"store.{name}": value for name, value in self._calls.numbers().items()}
        if self._calls.state is BreakerState.CLOSED:
            self._refresh()
        return found | {f"store.{name}": value for name, value in self._last.items()}

    def _refresh(self) -> None:
        loop = self._loop
        if loop is None or loop.is_closed() or _runs_here(loop):
            return
        # One call at a time: a store that hangs blocks one thread, not one for each scrape.
        if self._asking is None:
            self._asking = asyncio.run_coroutine_threadsafe(self._ask(), loop)
        try:
            self._last = self._asking.result(_LONGEST_WAIT_S)
        except TimeoutError:
            return
        except CancelledError:
            pass  # the loop ended
        self._asking = None

    async def _ask(self) -> dict[str, float]:
        try:
            with mapped("store", "stats"):
                numbers = await self._stats()
        except RetryLater:
            return {}
        return {name: numbers[name] for name in _OF_THE_STORE if name in numbers}


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
