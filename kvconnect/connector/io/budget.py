"""The time that requests wait for the store's answers to lookups."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from kvconnect.backends.guard.store import GuardedBackend
from kvconnect.errors import RetryLater
from kvconnect.trace import count

T = TypeVar("T")

# Pauses between probes of a store that answered too late. The first ones are short, as the store
# may recover at once. A probe's timeout is longer than a budget, since it may have to connect.
_FIRST_PAUSE_S = 0.05
_LAST_PAUSE_S = 1.0
_PROBE_S = 2.0


class LookupBudget:
    """The time that a step may wait for its lookups; after a late one, steps stop waiting.

    Waiting is suspended until a lookup is answered in time. So a store that is frozen or too slow
    delays one request by the budget, once. While waiting is suspended, a request uses only an
    answer that has arrived when the request is admitted, and an unknown key is looked up about
    every second as a probe. Five such probes in a row without an answer open the store's breaker.
    Lookups of requests cannot open it: they are cancelled when the requests end.

    `start_step` and `wait` belong to the engine's thread, the rest to the store's loop.

    Args:
        budget_s: seconds for all lookups of a step together.
        backend: the store.
        submit: starts a coroutine on the store's loop.
    """

    def __init__(
        self,
        budget_s: float,
        backend: GuardedBackend,
        submit: Callable[[Coroutine[Any, Any, None]], Future[None]],
    ) -> None:
        self._budget_s = budget_s
        self._backend = backend
        self._submit = submit
        self._left_s = budget_s
        self._probing: Future[None] | None = None
        self.suspended = False

    def start_step(self) -> None:
        """Starts the budget of a new step."""
        self._left_s = self._budget_s

    def wait(self, lookup: Future[Any]) -> None:
        """Blocks until `lookup` is done, at most for the rest of the step's budget."""
        if self.suspended or self._left_s <= 0 or lookup.done():
            return
        started = time.monotonic()
        try:
            lookup.exception(self._left_s)
        except TimeoutError:
            self._left_s = 0.0
            self._suspend()
        else:
            self._left_s -= time.monotonic() - started

    def leaves_time(self, asked_at: float) -> bool:
        """Returns whether a lookup that is not done is still within its budget; never blocks.

        Each lookup has the whole budget, counted from `asked_at`. A late lookup suspends the
        waiting of all others, as in `wait`.

        Args:
            asked_at: the monotonic time of the first request for its answer.
        """
        if self.suspended:
            return False
        if time.monotonic() - asked_at < self._budget_s:
            return True
        self._suspend()
        return False

    async def timed(self, look_up: Callable[[], Awaitable[T]]) -> T:
        """Returns the result of `look_up`; an answer in time makes steps wait again."""
        started = time.monotonic()
        answer = await look_up()
        if self.suspended and time.monotonic() - started <= self._budget_s:
            self.suspended = False
            count("connector.patience.found")
        return answer

    def end(self) -> None:
        """Cancels the probing."""
        if self._probing is not None:
            self._probing.cancel()

    def _suspend(self) -> None:
        self.suspended = True
        count("connector.patience.lost")
        # A probe that still runs may have seen the suspension end just before.
        self.end()
        self._probing = self._submit(self._probe())

    async def _probe(self) -> None:
        pause = _FIRST_PAUSE_S
        while self.suspended:
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE_S)
            try:
                await self.timed(lambda: self._backend.probe(max(_PROBE_S, self._budget_s)))
            except RetryLater:
                continue
