"""A pull over NIXL, and the part of it that one agent reads, or two side by side.

A transfer cannot be cancelled. So a pull is cut into transfers of a bounded size, of which each
agent has a few under way. When the pull is stopped, only those still land.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from kvconnect.errors import PullFailed
from kvconnect.transfer.nixl.agent import Agent, AgentError
from kvconnect.transfer.nixl.transfers import Transfer
from kvconnect.transfer.pull import Pull

# The transfers of a part under way. NIXL's progress thread blocks the polling thread for tens of
# milliseconds. With four transfers, all were done by then, and a link of 8 Gbit/s stood idle.
_WINDOW = 16


class NixlPull(Pull):
    """A read of one peer, by one agent or by several side by side. Thread-safe.

    The pull ends when all of its parts have ended, even if one failed: until then another part may
    still write. A failed part stops the others. The first part joins before `add`.

    Attributes:
        stopped: whether the pull is stopped, so that no further transfer begins.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.stopped = False
        self._transfers: deque[Transfer] = deque()
        self._parts: tuple[PullPart, ...] = ()
        self._open = 0
        self._error: PullFailed | None = None

    def join(self, part: PullPart) -> bool:
        """Adds `part`, which may call `take` from now on; returns False if the pull has ended."""
        with self._lock:
            if self._parts and not self._open:
                return False
            self._parts = (*self._parts, part)
            self._open += 1
        return True

    def add(self, transfers: Iterable[Transfer]) -> int:
        """Adds transfers and returns how many there are. Call it before a part is advanced."""
        self._transfers.extend(transfers)
        return len(self._transfers)

    def take(self) -> Transfer | None:
        """Removes and returns the next transfer; ``None`` at the end or if the pull is stopped."""
        if self.stopped:
            return None
        try:
            return self._transfers.popleft()
        except IndexError:
            return None

    def part_failed(self, error: PullFailed) -> None:
        """Stops the pull after a part failed. `done` fails when all parts have ended."""
        with self._lock:
            self._error = self._error or error
        self._stop()

    def part_ended(self) -> None:
        """Records that no byte of a part lands any more. Called once for each part."""
        with self._lock:
            self._open -= 1
            last = not self._open
        if last:
            self.finish(self._error)

    def _stop(self) -> None:
        self.stopped = True
        for part in self._parts:
            part.wake()


class PullPart:
    """A part of a pull. It belongs to the thread of the agent that reads it, except `wake`.

    Attributes:
        pull: the whole pull.
        peer: name of the peer's agent.
        wake: makes the thread check the part; may be called on any thread.
        error: the error that the part failed with; ``None`` if it did not fail.
        ended: no byte of the part lands any more.
    """

    def __init__(self, pull: NixlPull, peer: str, wake: Callable[[], None]) -> None:
        self.pull = pull
        self.peer = peer
        self.wake = wake
        self.error: PullFailed | None = None
        self.ended = False
        self._active: list[int] = []
        self._stuck: list[int] = []

    def advance(self, agent: Agent, *, quiescent: bool) -> bool:
        """Begins and checks transfers; returns whether anything changed.

        Args:
            agent: the agent that reads the part.
            quiescent: whether no byte of a failed transfer lands any more. If False, a failed
                transfer's handle is kept, and the part does not end until `cut_off`.
        """
        changed = self._check(agent, quiescent=quiescent)
        while len(self._active) < _WINDOW and (transfer := self.pull.take()) is not None:
            changed = True
            self._begin(agent, transfer, quiescent=quiescent)
        if not self._active and not self._stuck:
            self.end()
        elif self._stuck and not self._active and self.error is not None:
            self.pull.fail(self.error)
        return changed or self.ended

    @property
    def under_way(self) -> bool:
        """Returns whether the part has to be polled."""
        return bool(self._active)

    def refuse(self, error: PullFailed) -> None:
        """Fails the part with `error` before any transfer was begun."""
        self._fail_with(error)
        self.end()

    def end(self) -> None:
        """Marks the part as ended: no byte of it lands any more. Idempotent."""
        if not self.ended:
            self.ended = True
            self.pull.part_ended()

    def cut_off(self, agent: Agent, error: PullFailed) -> None:
        """Fails the part with `error` and frees all handles.

        The caller destroys the agent and then calls `end`.
        """
        self._fail_with(error)
        for transfer in (*self._active, *self._stuck):
            agent.release(transfer)
        self._active.clear()
        self._stuck.clear()

    def _begin(self, agent: Agent, transfer: Transfer, *, quiescent: bool) -> None:
        handle = None
        try:
            handle = agent.read(self.peer, transfer)
            done = agent.begin(handle)
        except AgentError as error:
            self._fail_of(error)
            if handle is not None:
                self._settle(agent, handle, sound=quiescent)
            return
        if done:
            agent.release(handle)
        else:
            self._active.append(handle)

    def _check(self, agent: Agent, *, quiescent: bool) -> bool:
        left = []
        for handle in self._active:
            try:
                done = agent.check(handle)
            except AgentError as error:
                self._fail_of(error)
                self._settle(agent, handle, sound=quiescent)
                continue
            if done:
                agent.release(handle)
            else:
                left.append(handle)
        changed = len(left) != len(self._active)
        self._active = left
        return changed

    def _settle(self, agent: Agent, handle: int, *, sound: bool) -> None:
        if sound:
            agent.release(handle)
        else:
            self._stuck.append(handle)

    def _fail_of(self, error: AgentError) -> None:
        self._fail_with(PullFailed("peer", f"{self.peer}: {error}"))

    def _fail_with(self, error: PullFailed) -> None:
        if self.error is None:
            self.error = error
            self.pull.part_failed(error)
