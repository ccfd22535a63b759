"""What one agent reads of a pull: a window of transfers, begun one after the other.

A transfer cannot be cancelled. So a pull is cut into transfers of a bounded size, of which a few
are under way: when it is stopped, only those still land.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvconnect.errors import PullFailed
from kvconnect.transfer.nixl.agent import Agent, AgentError
from kvconnect.transfer.nixl.transfers import Transfer

__all__ = ["PullPart", "Shared"]

# NIXL's progress thread keeps the one that polls out for tens of milliseconds: with four, all were
# done by then, and a link of 8 Gbit/s ran dry.
_WINDOW = 16


class Shared(Protocol):
    """What a part needs of the pull that it is a part of; thread-safe."""

    def take(self) -> Transfer | None:
        """Returns the next transfer, for one part alone; ``None``: there is none, or no more."""

    def fail(self, error: PullFailed) -> None:
        """Fails with `error` unless it is done, and stops."""

    def part_failed(self, error: PullFailed) -> None:
        """A part has failed."""

    def part_ended(self) -> None:
        """Nothing of a part lands any more; once for each."""


class PullPart:
    """Belongs to the thread of the agent that reads it, but for `wake`.

    Attributes:
        pull: that it is a part of.
        peer: name of the peer's agent.
        wake: makes the thread look at it; on any thread.
        error: what it failed of, if it did.
        ended: nothing of it lands any more.
    """

    def __init__(self, pull: Shared, peer: str, wake: Callable[[], None]) -> None:
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
            agent: that reads it.
            quiescent: nothing of a transfer that failed lands any more. If not, its handle is
                kept, and the part does not end until `cut_off`.
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
        """Whether it has to be polled."""
        return bool(self._active)

    def refuse(self, error: PullFailed) -> None:
        """Ends it by `error` before anything of it was begun."""
        self._fail_with(error)
        self.end()

    def end(self) -> None:
        """Nothing of it lands any more; again is harmless."""
        if not self.ended:
            self.ended = True
            self.pull.part_ended()

    def cut_off(self, agent: Agent, error: PullFailed) -> None:
        """Frees all of its handles; the caller destroys the agent and then calls `end`."""
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
