"""A circuit breaker: after failures, calls to a store are refused until a probe succeeds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from enum import IntEnum
from typing import Any

from kvconnect.errors import BackendUnavailable
from kvconnect.trace import Labels, count

logger = logging.getLogger("kvconnect")

_FAILURES_TO_OPEN = 5  # in a row
# The pauses between probes, and how long a probe runs before the next one may start beside it. Both
# together are well below the ten seconds within which a store that recovered is used again.
_FIRST_PAUSE_S = 1.0
_LAST_PAUSE_S = 5.0
_HALF_OPEN_S = 1.0
# A store may be slower than the pauses, so a newer probe does not cancel an older one. Few may run
# at a time, since each that hangs holds a connection or a thread.
_MOST_PROBES = 8
# A breaker that opens again and again logs a warning only once in so many seconds.
_QUIET_S = 60.0


class BreakerState(IntEnum):
    """The state of a `Breaker`; the values are those of its gauge."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """A breaker that opens after five failures in a row and closes when a probe succeeds.

    With a `probe`, users' calls never probe: they fail at once while the breaker is not closed.
    Probes start a second after the breaker opened. The pause doubles from probe to probe, up to
    five seconds. Without a `probe`, users' calls are the probes, one at a time, after the same
    pauses. Belongs to one event loop.

    Args:
        name: the name of the store and the kind of call, for messages.
        probe: a cheap call to the store with a deadline of its own; raises if it failed.

    Attributes:
        labels: the labels of its counters (``store.breaker.opened``, ``store.breaker.closed``).
    """

    def __init__(self, name: str, probe: Callable[[], Coroutine[Any, Any, object]] | None) -> None:
        self.name = name
        self.state = BreakerState.CLOSED
        self._probe = probe
        self.labels: Labels = ()
        self._in_a_row = 0
        self._pause_s = _FIRST_PAUSE_S
        self._admits_at = 0.0
        self._reason = ""
        self._probing: asyncio.Task[None] | None = None
        self._logged_at = float("-inf")

    def check(self) -> None:
        """Raises unless the breaker is closed, at almost no cost.

        Raises:
            BackendUnavailable: the breaker is open.
        """
        admits_one = self._probe is None and self.state is BreakerState.OPEN
        if admits_one and asyncio.get_running_loop().time() >= self._admits_at:
            self.state = BreakerState.HALF_OPEN
            return
        if self.state is not BreakerState.CLOSED:
            count("store.refused", self.labels)
            raise BackendUnavailable(
                f"{self.name}: is left alone for now ({self._reason}); "
                "it is used again once it answers"
            )

    def succeeded(self) -> None:
        """Records that a call was answered."""
        self._in_a_row = 0
        if self._probe is None and self.state is not BreakerState.CLOSED:
            self._close()

    def given_up(self) -> None:
        """Records that the caller cancelled a call before it was answered."""
        if self._probe is None and self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.OPEN

    def failed(self, error: Exception) -> None:
        """Records that a call failed, or was not answered in time."""
        self._in_a_row += 1
        if self._probe is None and self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.OPEN
            self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)
            self._admits_at = asyncio.get_running_loop().time() + self._pause_s
        if self._in_a_row >= _FAILURES_TO_OPEN:
            self.open(f"{self._in_a_row} failures in a row, the last one: {error}")

    def open(self, reason: str) -> None:
        """Opens the breaker and starts to probe the store; does nothing unless it was closed."""
        if self.state is not BreakerState.CLOSED:
            return
        self._reason = reason
        self.state = BreakerState.OPEN
        count("store.breaker.opened", self.labels)
        loop = asyncio.get_running_loop()
        quiet = loop.time() - self._logged_at < _QUIET_S
        self._logged_at = loop.time()
        logger.log(
            logging.DEBUG if quiet else logging.WARNING,
            "%s: is left alone until it answers again: %s",
            self.name,
            reason,
        )
        self._pause_s = _FIRST_PAUSE_S
        self._admits_at = loop.time() + self._pause_s
        if self._probe is not None:
            self._probing = loop.create_task(
                self._probe_until_answered(self._probe), name="kvconnect-probes"
            )

    def stop(self) -> None:
        """Stops probing; an open breaker stays open."""
        if self._probing is not None:
            self._probing.cancel()
            self._probing = None

    async def _probe_until_answered(self, probe: Callable[[], Coroutine[Any, Any, object]]) -> None:
        pause = _FIRST_PAUSE_S
        probes: list[asyncio.Task[bool]] = []
        try:
            while not await _any_answered(probes, pause):
                if len(probes) == _MOST_PROBES:
                    probes.pop(0).cancel()
                probes.append(asyncio.ensure_future(self._answered(probe)))
                self.state = BreakerState.HALF_OPEN
                if await _any_answered(probes, _HALF_OPEN_S, newest_ends=True):
                    break
                self.state = BreakerState.OPEN
                pause = min(2 * pause, _LAST_PAUSE_S)
        finally:
            for one in probes:
                one.cancel()
        self._close()

    async def _answered(self, probe: Callable[[], Coroutine[Any, Any, object]]) -> bool:
        try:
            await probe()
        except Exception as error:  # noqa: BLE001  whatever it is, the store does not work yet
            logger.debug("%s: still does not answer: %s", self.name, error)
            return False
        return True

    def _close(self) -> None:
        self.state = BreakerState.CLOSED
        self._in_a_row = 0
        self._probing = None
        count("store.breaker.closed", self.labels)
        logger.info("%s: answers again", self.name)


async def _any_answered(
    probes: list[asyncio.Task[bool]], timeout_s: float, *, newest_ends: bool = False
) -> bool:
    """Returns whether one of `probes` succeeded within `timeout_s`; removes those that failed.

    With `newest_ends`, the failure of the newest probe ends the wait.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    newest = probes[-1] if probes else None
    while (left := deadline - loop.time()) > 0:
        if not probes:
            await asyncio.sleep(left)
            break
        done, _ = await asyncio.wait(probes, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if any(not one.cancelled() and one.result() for one in done):
            return True
        probes[:] = [one for one in probes if one not in done]
        if newest_ends and newest in done:
            break
    return False
