"""A pull over NIXL: transfers that one agent or several take one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvconnect.errors import PullFailed
from kvconnect.transfer.nixl.pull_part import PullPart
from kvconnect.transfer.nixl.transfers import Transfer
from kvconnect.transfer.pull import Pull

__all__ = ["NixlPull"]


class NixlPull(Pull):
    """What is read of one peer, by one agent or by several side by side. Thread-safe.

    It ends when all of its parts have, whatever went wrong in one of them: until then another may
    still write. What fails in one part stops the others. The first part joins before `add`.

    Attributes:
        stopped: no further transfer begins.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.stopped = False
        self._transfers: deque[Transfer] = deque()
        self._parts: tuple[PullPart, ...] = ()
        self._open = 0
        self._error: PullFailed | None = None

    def join(self, part: PullPart) -> bool:
        """`part` takes transfers from now on; False: all parts have ended, and so has this."""
        with self._lock:
            if self._parts and not self._open:
                return False
            self._parts = (*self._parts, part)
            self._open += 1
        return True

    def add(self, transfers: Iterable[Transfer]) -> int:
        """These are to be read; returns how many. Before a part is advanced."""
        self._transfers.extend(transfers)
        return len(self._transfers)

    def take(self) -> Transfer | None:
        """Returns the next transfer, for one part alone; ``None``: there is none, or no more."""
        if self.stopped:
            return None
        try:
            return self._transfers.popleft()
        except IndexError:
            return None

    def part_failed(self, error: PullFailed) -> None:
        """A part has failed: no other begins a transfer. `done` fails when all have ended."""
        with self._lock:
            self._error = self._error or error
        self._stop()

    def part_ended(self) -> None:
        """Nothing of a part lands any more; once for each."""
        with self._lock:
            self._open -= 1
            last = not self._open
        if last:
            self.finish(self._error)

    def _stop(self) -> None:
        self.stopped = True
        for part in self._parts:
            part.wake()
