"""A read from a peer that is under way, the two events that end it, and its deadline."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from kvconnect.errors import PullFailed
from kvconnect.trace import Event, count, metrics
from kvconnect.transfer.leases.timer import Timer


class Terminal:
    """An event that happens once and can be waited for and listened to. Thread-safe."""

    def __init__(self) -> None:
        self._happened: Future[None] = Future()
        self._lock = threading.Lock()
        self._claimed = False

    def is_set(self) -> bool:
        """Returns whether the event happened."""
        return self._happened.done()

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until the event happened or for `timeout` seconds; returns whether it happened."""
        try:
            self._happened.result(timeout)
        except TimeoutError:
            return False
        return True

    def add_callback(self, callback: Callable[[], object]) -> None:
        """Calls `callback` once: on the thread of the event, or now if it has happened.

        `callback` must not block. Its exceptions are logged and go no further.
        """
        self._happened.add_done_callback(lambda _: callback())

    def set(self) -> None:
        """Makes the event happen, once. For the transport."""
        with self._lock:
            first, self._claimed = not self._claimed, True
        if first:
            self._happened.set_result(None)


class Pull:
    """A batch of reads. Thread-safe.

    Attributes:
        done: resolves when all bytes are there, and then `terminal` is set; raises `PullFailed`
            otherwise, by the deadline at the latest. Cannot be cancelled: use `abandon`.
        terminal: set when no byte of this pull lands any more. Until then the destination belongs
            to the transport, also after `done` has failed.
        nbytes: the bytes of all its pieces.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.done: Future[None] = Future()
        self.done.set_running_or_notify_cancel()
        self.terminal = Terminal()
        self._lock = threading.Lock()
        self._settled = False
        self._began = time.perf_counter()

    def abandon(self) -> None:
        """Fails `done` now, unless it is done. `terminal` is set later. Never blocks."""
        self.fail(PullFailed("abandoned", "the pull was abandoned"))

    def fail(self, error: PullFailed) -> None:
        """Fails `done` with `error` unless it is done, and stops reading. For the transport."""
        if self._settle(error):
            self._stop()

    def finish(self, error: PullFailed | None = None) -> None:
        """Sets `terminal`, then resolves `done`, or fails it with `error`. For the transport.

        The caller makes sure that no byte lands any more.
        """
        self.terminal.set()
        self._settle(error)

    def _stop(self) -> None:
        """Makes the running reads stop; overridden by the transports. Never blocks."""

    def _settle(self, error: PullFailed | None) -> bool:
        with self._lock:  # callbacks of `done` run outside of it: they may call `abandon`
            if self._settled:
                return False
            self._settled = True
        seconds = time.perf_counter() - self._began
        if error is None:
            metrics.emit(Event("transfer.pull", seconds, {"bytes": self.nbytes}))
            self.done.set_result(None)
        else:
            metrics.emit(Event("transfer.pull", seconds, error=error))
            count(f"transfer.pull.{error.reason}")
            self.done.set_exception(error)
        return True


class Deadlines:
    """Fails every watched pull that is not done at its deadline, even if a transport hangs.

    Its thread sleeps in between.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pulls: dict[Pull, tuple[float, float]] = {}  # the deadline, and how long it was
        self._due = math.inf
        self._timer = Timer("kvconnect-deadlines", self._fail_late, time.monotonic)

    def watch(self, pull: Pull, seconds: float) -> None:
        """Fails `pull` after `seconds` unless it is done by then. Never blocks."""
        at = time.monotonic() + seconds
        with self._lock:
            self._pulls[pull] = at, seconds
            is_next = at < self._due
            self._due = min(at, self._due)
        if is_next:
            self._timer.wake()
        pull.done.add_done_callback(lambda _: self._forget(pull))

    def close(self) -> None:
        """Ends the thread. Remaining pulls are no longer watched."""
        self._timer.close()

    def _forget(self, pull: Pull) -> None:
        with self._lock:
            self._pulls.pop(pull, None)

    def _fail_late(self) -> float | None:
        """Fails the pulls whose deadline has passed; returns the next deadline."""
        with self._lock:
            now = time.monotonic()
            late = {pull: seconds for pull, (at, seconds) in self._pulls.items() if at <= now}
            waiting = (at for pull, (at, _) in self._pulls.items() if pull not in late)
            self._due = due = min(waiting, default=math.inf)
        for pull, seconds in late.items():
            pull.fail(PullFailed("deadline", f"the peer did not deliver within {seconds:g} s"))
        return None if due == math.inf else due
