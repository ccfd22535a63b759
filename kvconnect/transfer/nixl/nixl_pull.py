"""A pull over NIXL: a window of transfers, begun one after the other.

A transfer cannot be cancelled. So a pull is cut into transfers of a bounded size, of which a few
are under way: when it is stopped, only those still land.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from kvconnect.errors import PullFailed
from kvconnect.transfer.nixl.agent import Agent, AgentError, Indices
from kvconnect.transfer.pull import Pull
from kvconnect.transfer.reads import RUN, Runs

__all__ = ["NixlPull", "batches", "chopped"]

_TRANSFER_NBYTES = 16 << 20
_WINDOW = 4


class NixlPull(Pull):
    """Reads pairwise equal runs. All methods that begin with `_` or take an agent: its thread's.

    Attributes:
        peer: name of the peer's agent.
    """

    def __init__(self, nbytes: int, peer: str, wake: Callable[[], None]) -> None:
        super().__init__(nbytes)
        self.peer = peer
        self._wake = wake
        self._stopped = False
        self._error: PullFailed | None = None
        self._prepared: list[int] = []
        self._waiting: list[Indices] = []
        self._active: list[int] = []
        self._stuck: list[int] = []

    def _stop(self) -> None:
        self._stopped = True
        self._wake()

    def prepare(self, prepared: list[int], transfers: list[Indices]) -> None:
        """Takes the prepared local and remote runs, and which of them each transfer reads."""
        self._prepared = prepared
        self._waiting = transfers[::-1]

    def advance(self, agent: Agent, *, quiescent: bool) -> bool:
        """Begins and checks transfers; returns whether anything changed.

        Args:
            agent: that prepared it.
            quiescent: nothing of a transfer that failed lands any more. If not, its handle is
                kept, and the pull is not terminal until `cut_off`.
        """
        changed = self._check(agent, quiescent=quiescent)
        while self._waiting and len(self._active) < _WINDOW and not self._stopped:
            changed = True
            self._begin(agent, self._waiting.pop(), quiescent=quiescent)
        if self._stopped:
            self._waiting.clear()
        if not self._waiting and not self._active and not self._stuck:
            self._free(agent)
            self.finish(self._error)
        elif self._stuck and not self._active and self._error is not None:
            self.fail(self._error)
        return changed or self.terminal.is_set()

    @property
    def under_way(self) -> bool:
        """Whether it has to be polled."""
        return bool(self._active or self._waiting) and not self.terminal.is_set()

    def cut_off(self, agent: Agent, error: PullFailed) -> None:
        """Frees all of its handles; the caller destroys the agent and then calls `finish`."""
        self._error = self._error or error
        for transfer in (*self._active, *self._stuck):
            agent.release(transfer)
        self._active.clear()
        self._stuck.clear()
        self._waiting.clear()
        self._free(agent)

    @property
    def error(self) -> PullFailed | None:
        """What it failed of, if it did."""
        return self._error

    def _begin(self, agent: Agent, indices: Indices, *, quiescent: bool) -> None:
        local, remote = self._prepared
        transfer = None
        try:
            transfer = agent.read(local, remote, indices)
            done = agent.begin(transfer)
        except AgentError as error:
            self._fail_with(error)
            if transfer is not None:
                self._end(agent, transfer, sound=quiescent)
            return
        if done:
            agent.release(transfer)
        else:
            self._active.append(transfer)

    def _check(self, agent: Agent, *, quiescent: bool) -> bool:
        left = []
        for transfer in self._active:
            try:
                done = agent.check(transfer)
            except AgentError as error:
                self._fail_with(error)
                self._end(agent, transfer, sound=quiescent)
                continue
            if done:
                agent.release(transfer)
            else:
                left.append(transfer)
        changed = len(left) != len(self._active)
        self._active = left
        return changed

    def _end(self, agent: Agent, transfer: int, *, sound: bool) -> None:
        if sound:
            agent.release(transfer)
        else:
            self._stuck.append(transfer)

    def _fail_with(self, error: AgentError) -> None:
        self._error = self._error or PullFailed("peer", f"{self.peer}: {error}")
        self._stopped = True

    def _free(self, agent: Agent) -> None:
        for prepared in self._prepared:
            agent.release_prepared(prepared)
        self._prepared = []


def chopped(runs: Runs) -> Runs:
    """Returns `runs` with none larger than a transfer."""
    if not len(runs) or int(runs["nbytes"].max()) <= _TRANSFER_NBYTES:
        return runs
    counts = -(-runs["nbytes"] // _TRANSFER_NBYTES)
    of = np.repeat(np.arange(len(runs)), counts)
    first = np.cumsum(counts) - counts
    skipped = (np.arange(len(of)) - first[of]) * _TRANSFER_NBYTES
    parts = np.empty(len(of), RUN)
    parts["offset"] = runs["offset"][of] + skipped
    parts["nbytes"] = np.minimum(runs["nbytes"][of] - skipped, _TRANSFER_NBYTES)
    return parts


def batches(runs: Runs) -> list[Indices]:
    """Returns which of `runs` (`chopped`) go into each transfer."""
    ends = np.cumsum(runs["nbytes"])
    total = int(ends[-1])
    marks = np.searchsorted(ends, np.arange(_TRANSFER_NBYTES, total, _TRANSFER_NBYTES)) + 1
    bounds = np.unique(np.concatenate(([0], marks, [len(runs)])))
    indices = np.arange(len(runs), dtype=np.int32)
    return [indices[begin:end] for begin, end in pairwise(bounds.tolist())]
