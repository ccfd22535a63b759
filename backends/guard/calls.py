"""Calls to a backend: each has a deadline, and their number at a time is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from kvconnect.backends.guard.breaker import Breaker, BreakerState
from kvconnect.errors import (
    BackendTimeout,
    BackendUnavailable,
    ConfigurationError,
    RetryLater,
    UsageError,
)
from kvconnect.redaction import as_cause, text_without_passwords
from kvconnect.trace import Labels, count

S = TypeVar("S")
T = TypeVar("T")

Wanted = Callable[[], bool]
"""Returns whether a caller still waits for a call."""

_DRAIN_POLL_S = 0.05
# The calls that run at a time; further ones wait for their turn.
_MOST_AT_A_TIME = 64
# The running calls past their deadline after which calls fail at once: each may hold a thread and
# buffers, and a store that hangs must not take them all.
_MOST_ABANDONED = 16


@contextmanager
def mapped(name: str, operation: str) -> Iterator[None]:
    """Maps the exceptions of a backend to the errors of the `Backend` contract.

    Raises:
        BackendUnavailable: from the backend's own exception.
    """
    try:
        yield
    except (ConfigurationError, RetryLater):
        raise
    except Exception as error:  # noqa: BLE001  raised as one of ours
        text = text_without_passwords(str(error)) or type(error).__name__
        raise BackendUnavailable(f"{name}: {operation} failed: {text}") from as_cause(error)


class Calls:
    """The calls of one backend. All methods run on its event loop.

    Each kind of call has a breaker of its own: a store that answers lookups may fail every load.

    | calls that fail | calls that are refused then | probes that close the breaker |
    |---|---|---|
    | lookups | all | lookups of a key that no block has |
    | loads | loads, and lookups: a block that is found cannot be loaded | `probe_load` |
    | any other | of their kind | the callers' own calls, one at a time |

    Args:
        name: the backend's name, for messages.
        deadline_s: seconds that a call may take, including the wait for its turn.
        probe: a cheap call to the store, whose success shows that it works again.
        probe_load: a load, started as by `run`, whose success shows that loads work again.

    Attributes:
        closed: whether `drain` was called.
    """

    def __init__(
        self,
        name: str,
        deadline_s: float,
        *,
        probe: Callable[[], Coroutine[Any, Any, object]],
        probe_load: Callable[[Wanted], Coroutine[Any, Any, object]],
    ) -> None:
        self.name = name
        self.deadline_s = deadline_s
        self._inner_probe = probe
        self._inner_probe_load = probe_load
        self._breaker = Breaker(name, self._probe)
        self._loads = Breaker(f"{name}: load", self._probe_load)
        self._breakers = {"lookup": self._breaker, "load": self._loads}
        self._turns = asyncio.Semaphore(_MOST_AT_A_TIME)
        self._running: set[asyncio.Task[Any]] = set()
        self._abandoned: set[asyncio.Task[Any]] = set()
        self.closed = False

    @property
    def labels(self) -> Labels:
        """The labels of the counters, also of the breakers'; may be set before the first call."""
        return self._breaker.labels

    @labels.setter
    def labels(self, labels: Labels) -> None:
        for breaker in self._breakers.values():
            breaker.labels = labels

    def numbers(self) -> dict[str, float]:
        """Returns the breaker's state and the number of calls as entries of `Backend.stats`.

        ``running`` counts the calls that have not ended, and ``abandoned`` those of them that are
        past their deadline.
        """
        return {
            "breaker_state": float(self.state),
            "running": len(self._running),
            "abandoned": len(self._abandoned),
        }

    @property
    def state(self) -> BreakerState:
        """The worse state of two breakers: that of lookups and that of loads."""
        return max(self._breaker.state, self._loads.state)

    async def run(
        self,
        operation: str,
        start: Callable[[Wanted], Coroutine[Any, Any, T]],
        *,
        holds_buffers: bool = False,
        deadline_s: float | None = None,
        always: bool = False,
    ) -> T:
        """Returns the result of ``start(wanted)``, within the deadline, or `deadline_s` if given.

        `wanted` returns false from the deadline on, when no caller waits any more.
        With `holds_buffers` the coroutine is never cancelled: at the deadline it is left running,
        and cancelling `run` takes effect only when it has ended or its deadline has come. With
        `always` the call ignores the breakers, as `open` and `close` do.

        Raises:
            BackendTimeout: not done in time; `pending` is done when the call has ended.
            BackendUnavailable: it failed, the backend is closed, or a breaker is open.
        """
        loop = asyncio.get_running_loop()
        seconds = self.deadline_s if deadline_s is None else deadline_s
        with nullcontext() if always else self._admitted(operation):
            deadline = loop.time() + seconds
            await self._take_turn(operation, deadline, seconds)
            try:
                work = _contained(lambda: start(lambda: task not in self._abandoned))
                task = loop.create_task(work, name=f"kvconnect-{operation}")
                self._running.add(task)
                task.add_done_callback(self._ended)
                if not await _wait(task, deadline, holds_buffers=holds_buffers):
                    raise self._abandon(operation, task, seconds, holds_buffers=holds_buffers)
            finally:
                self._turns.release()
            if task.cancelled():
                # Cancelled by other code: it must not look like the caller's cancellation.
                raise BackendUnavailable(f"{self.name}: {operation} failed: the store cancelled it")
            with mapped(self.name, operation):
                return task.result()

    async def drain(self) -> None:
        """Refuses further calls, stops probing and waits for running calls up to their deadlines.

        Abandoned calls are not waited for: their deadline has passed, and they may never end.
        """
        self.closed = True
        for breaker in self._breakers.values():
            breaker.stop()
        deadline = asyncio.get_running_loop().time() + self.deadline_s
        while waiting := self._running - self._abandoned:
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                break
            # In short waits, because a call that is abandoned meanwhile may not end.
            await asyncio.wait(waiting, timeout=min(left, _DRAIN_POLL_S))

    @contextmanager
    def _admitted(self, operation: str) -> Iterator[None]:
        """Refuses a call that a breaker refuses, and reports the call's end to the breaker."""
        breaker = self._admit(operation)
        try:
            yield
        except RetryLater as error:
            if not isinstance(error, BackendTimeout):
                count("store.failure", self.labels)
            breaker.failed(error)
            raise
        except BaseException:
            breaker.given_up()
            raise
        breaker.succeeded()

    def _admit(self, operation: str) -> Breaker:
        # The only refusal of calls before they use resources.
        if self.closed:
            raise BackendUnavailable(f"{self.name}: is closed")
        self._breaker.check()
        if operation == "lookup":
            self._loads.check()
            return self._breaker
        breaker = self._breakers.get(operation)
        if breaker is None:
            breaker = Breaker(f"{self.name}: {operation}", None)
            breaker.labels = self.labels
            self._breakers[operation] = breaker
        breaker.check()
        return breaker

    async def _probe_load(self) -> None:
        if self._hangs:
            raise BackendUnavailable(self._hangs)
        await self.run("load", self._inner_probe_load, holds_buffers=True, always=True)

    async def _probe(self) -> None:
        if self._hangs:
            raise BackendUnavailable(self._hangs)
        async with asyncio.timeout(self.deadline_s):
            await _contained(self._inner_probe)

    @property
    def _hangs(self) -> str:
        if len(self._abandoned) < _MOST_ABANDONED:
            return ""
        return f"{len(self._abandoned)} calls past their deadline still run"

    async def _take_turn(self, operation: str, deadline: float, seconds: float) -> None:
        if not self._turns.locked():
            await self._turns.acquire()
            return
        try:
            async with asyncio.timeout_at(deadline):
                await self._turns.acquire()
        except TimeoutError as error:
            raise self._timeout(operation, seconds) from error

    def _timeout(
        self, operation: str, seconds: float, pending: Future[None] | None = None
    ) -> BackendTimeout:
        count("store.timeout", self.labels)
        return BackendTimeout(f"{self.name}: {operation} took longer than {seconds:g} s", pending)

    def _abandon(
        self, operation: str, task: asyncio.Task[Any], seconds: float, *, holds_buffers: bool
    ) -> BackendTimeout:
        pending: Future[None] = Future()
        pending.set_running_or_notify_cancel()
        task.add_done_callback(lambda _: _settle(pending, task))
        self._abandoned.add(task)
        if self._hangs and not self.closed:
            self._breaker.open(self._hangs)
        if not holds_buffers:
            task.cancel()
        return self._timeout(operation, seconds, pending)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        self._abandoned.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, or asyncio would log an abandoned call's error


async def _contained(begin: Callable[[], Awaitable[T]]) -> T:
    """Returns the result of ``begin()``; turns attempts to exit the process into errors.

    Raises:
        Exception: what ``begin()`` raises. Cancellation and `GeneratorExit` pass unchanged; other
            exceptions that are no `Exception` become a `RuntimeError`, since out of a task some
            of them stop the event loop.
    """
    try:
        return await begin()
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except SystemExit as error:
        raise RuntimeError(f"the store called exit({error.code!r})") from error
    except BaseException as error:
        raise RuntimeError(f"the store raised {error!r}") from error


async def _wait(task: asyncio.Task[Any], deadline: float, *, holds_buffers: bool) -> bool:
    """Waits for `task` until `deadline`; returns whether it is done."""
    loop = asyncio.get_running_loop()
    cancelled: asyncio.CancelledError | None = None
    while not task.done() and (left := deadline - loop.time()) > 0:
        try:
            await asyncio.wait({task}, timeout=left)
        except asyncio.CancelledError as error:
            if not holds_buffers:
                task.cancel()
                raise
            cancelled = error
    if cancelled is not None and task.done():
        raise cancelled
    return task.done()


def _settle(pending: Future[None], task: asyncio.Task[Any]) -> None:
    # A tiered store's call may end while one tier, past its deadline, still uses the buffers.
    error = None if task.cancelled() else task.exception()
    inner = error.pending if isinstance(error, BackendTimeout) else None
    if inner is None:
        pending.set_result(None)
    else:
        inner.add_done_callback(lambda _: pending.set_result(None))


async def together(first: Awaitable[T], second: Awaitable[S]) -> tuple[T, S]:
    """Returns both results. If one fails, raises after the other has ended: both use buffers."""
    one, other = await asyncio.gather(
        _contained(lambda: first), _contained(lambda: second), return_exceptions=True
    )
    raise_any((one, other))
    return one, other  # type: ignore[return-value]


def raise_any(results: Sequence[object]) -> None:
    """Raises the first error in `results`, if any, with the calls that still hold buffers.

    Raises:
        BackendTimeout: an error has `pending`; the raised error's `pending` is done when all of
            them are.
    """
    errors = [result for result in results if isinstance(result, BaseException)]
    pending = [
        error.pending
        for error in errors
        if isinstance(error, BackendTimeout) and error.pending is not None
    ]
    for error in errors:
        if not pending:
            raise error
        if isinstance(error, BackendTimeout):
            raise BackendTimeout(str(error), _all_done(pending)) from error


def _all_done(pending: Sequence[Future[None]]) -> Future[None]:
    whole: Future[None] = Future()
    whole.set_running_or_notify_cancel()
    left = set(pending)

    def ended(one: Future[None]) -> None:
        left.discard(one)
        if not left and not whole.done():
            whole.set_result(None)

    for one in pending:
        one.add_done_callback(ended)
    return whole


def counted(answer: object, limit: int, name: str, operation: str) -> int:
    """Returns `answer` of a backend if it is a number of blocks from 0 to `limit`.

    Raises:
        BackendUnavailable: it is no such number; the answer must not be used.
    """
    if isinstance(answer, int) and 0 <= answer <= limit:
        return answer
    raise BackendUnavailable(f"{name}: {operation} of {limit} blocks answered {answer!r}")


def unopened(name: str) -> UsageError:
    """Returns the error of a call before `open`."""
    return UsageError(f"{name}: open() was not called, or failed")
